"""Names of the engines, importable without torch."""

ENGINE_NAMES = (
    "autoregressive",
    "prompt-lookup",
    "suffix",
    "token-recycling",
    "token-recycling-static",
    "token-recycling-static-80",
    "token-recycling-no-noise",
    "tokenswift",
    "tokenswift-paper",
    "triforce",
    "griffin",
    "griffin-paper",
)
DEFAULT_ENGINE = "token-recycling"
