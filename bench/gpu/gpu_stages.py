"""The stages of `bench gpu --everything`, the most valuable first, each with its time and what it proves. Light."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class GPUStage:
    """One stage, which a process of its own runs; `proves` are items of docs/gpu.md, "Unproved", and of its checks."""

    name: str
    place: str  # module:function of a `Tries`, with a dot in front below this package
    seconds: int  # after which its process is killed
    proves: tuple[str, ...]

    @property
    def module_and_function(self) -> tuple[str, str]:
        """The place of its function."""
        module, _, function = self.place.partition(":")
        return (PACKAGE + module if module.startswith(".") else module), function


STAGES = (
    GPUStage("products", ".exact_stages:products", 90, ("Another GPU",)),
    GPUStage("rows", ".exact_stages:rows", 120, ("Another GPU",)),
    GPUStage("attention", ".exact_stages:attention", 90, ("Another GPU",)),
    GPUStage("packed", ".exact_stages:packed", 90, ("Packed weights",)),
    GPUStage("kept rows", ".exact_stages:kept_rows", 90, ("Keys and values in 8 bits",)),
    GPUStage(
        *("bits", ".command_stages:bits", 300),
        ("Pages", "Keys and values in 8 bits", "Experts", "Offloaded caches", "Scanned texts"),
    ),
    GPUStage(
        *("rows of kinds", ".command_stages:rows_of_kinds", 240), ("Experts", "Latent attention", "Layers with states")
    ),
    GPUStage("draws", ".draw_stage:draws", 90, ("Sorting for top-k, top-p and eta",)),
    GPUStage("jobs", ".job_stage:jobs", 150, ("Steps of many jobs", "The reserves", "Forwards of 128 and 256 rows")),
    GPUStage("families", ".family_stage:families", 150, ("Experts", "Latent attention", "Layers with states")),
    GPUStage("host", ".host_stage:host", 60, ("Steps of many jobs",)),
    GPUStage("wide products", ".speed_stages:wide_products", 120, ("Forwards of 128 and 256 rows",)),
    GPUStage("scans", ".speed_stages:scans", 90, ("Scanned texts",)),
    GPUStage("copies", ".copy_stage:copies", 90, ("Copies beside the computation", "Offloaded caches")),
    GPUStage("graph memory", ".speed_stages:graph_memory", 60, ("The reserves",)),
    GPUStage("loading", ".copy_stage:loading", 60, ("Loading weights",)),
    GPUStage("restart", ".restart_stage:restart", 150, ("A run over Ray on GPUs",)),
    GPUStage("second process", ".exact_stages:second_process", 120, ("Another GPU",)),
    GPUStage("engines", ".engine_stage:engines", 180, ("Every engine",)),
    GPUStage("flash", ".exact_stages:flash", 120, ("flash-attn",)),
    GPUStage(
        *("kinds of models", ".command_stages:kinds", 300),
        ("Latent attention", "Layers with states", "Other kinds of models"),
    ),
    GPUStage("predictors", ".command_stages:predictors", 180, ("Layers that predict further tokens",)),
    GPUStage("tests", ".command_stages:tests", 300, ("Every engine",)),
    GPUStage("Ray", ".command_stages:ray_run", 240, ("A run over Ray on GPUs",)),
)
