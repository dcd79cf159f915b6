"""Tiny random models of every kind, and the table of their distance to transformers."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from swiftbatch.worker.exactness.forward_comparisons import Agreement, compare
from swiftbatch.worker.forward import transformers_attention
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
from swiftbatch.worker.model.architectures.catalogue import ALIASES, ARCHITECTURES, GGUF_KINDS, NESTED, needs_indexers
from swiftbatch.worker.model.attention_needs import FULL
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.digests import Digests
from swiftbatch.worker.model.gguf.header import READABLE
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.model.text_config import text_view
from tests.worker.model.kind_sizes import NUM_POSITIONS, OWN_SIZES, RECURRENT, SIZES, VOCAB_SIZE, WITH_STATES

WITH_INDEXERS = tuple(kind for kind in ARCHITECTURES if needs_indexers({"model_type": kind}))
OURS_ALONE = (*WITH_INDEXERS, "mimo_v2_flash")
"""Kinds that only our kernels run."""
LATER = (  # kinds whose parts others also have; slow tests cover them
    *("afmoe", "cohere2_moe", "exaone_moe", "flex_olmo", "granite_swa", "granitemoe_swa", "granitemoeshared"),
    *("hunyuan_v1_moe", "hy_v3", "internlm3", "iquestcoder", "jais2", "laguna", "mellum", "solar_open", "vaultgemma"),
)
EACH_KIND = [pytest.param(kind, marks=pytest.mark.slow) if kind in LATER else kind for kind in ARCHITECTURES]


def tiny_config(kind: str, window: int = 100, has_wide_heads: bool = False) -> PreTrainedConfig:
    """Windows are exceeded by 300 tokens; wide heads fit the kernels."""
    sizes = {**SIZES, "sliding_window": window, "attention_chunk_size": window, **OWN_SIZES.get(kind, {})}
    if has_wide_heads:
        sizes |= {"qk_nope_head_dim": 48} if "qk_nope_head_dim" in sizes else {"head_dim": 64, "hidden_size": 256}
    if kind.startswith("gemma4_"):
        sizes["global_head_dim"] = sizes["head_dim"]  # transformers' layers take one
    return AutoConfig.for_model(kind, **sizes)


def tiny_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Make norms, sinks and routers random too: their initial ones and zeros would hide mistakes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.rand(len(table), model.config.n_routed_experts).argsort()[:, : table.shape[1]])
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("position_bias") or ("router" in name and not parameter.any()):
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tiny_target(
    kind: str, dtype: torch.dtype = torch.float32, window: int = 100, variant: str | None = None
) -> TargetModel:
    """With `variant`, plain layers use its kernels."""
    if kind in OURS_ALONE:
        return _from_files(kind, dtype)
    model = tiny_model(tiny_config(kind, window, variant is not None), dtype)
    files = ModelFiles(kind, Path(kind), Digests({}, {}), NUM_POSITIONS, VOCAB_SIZE)
    return TargetModel(TransformersForwards(model, files, variant), files)


@functools.cache
def _from_files(kind: str, dtype: torch.dtype) -> TargetModel:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return native_target(kind, folder, str(dtype).removeprefix("torch."))


def target_that_drops(asked: str, monkeypatch: pytest.MonkeyPatch, variant: str | None = None) -> TargetModel:
    """Lose the model's `span`, `softcap` or `sinks`."""
    target = tiny_target({"span": "mistral", "softcap": "gemma2", "sinks": "gpt_oss"}[asked], variant=variant)
    if asked == "span":
        target.transformers.spans = [FULL] * len(target.transformers.spans)
    else:
        asks = transformers_attention.Asked
        monkeypatch.setattr(transformers_attention, "Asked", lambda *args: asks(args[0]))
    return target


def save_tiny(config: PreTrainedConfig, folder: Path) -> None:
    tiny_model(config).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    foreign = (set(SIZES) | {"sliding_window", "attention_chunk_size", *RECURRENT}) - set(type(config)().to_dict())
    (folder / "config.json").write_text(json.dumps({key: said[key] for key in said if key not in foreign}))


def native_target(kind: str, folder: Path, dtype: str = "float32") -> TargetModel:
    save_tiny(tiny_config(kind, has_wide_heads=True), folder)
    return TargetModel.load(locate_model(str(folder)), dtype, "cpu")


def asks_for(target: TargetModel) -> str:
    """Name what a kind's attention needs besides keys and values."""
    config = target.model.config
    spans = [] if config.model_type in OURS_ALONE else target.transformers.spans
    words = sorted({"full": "", "window": "sliding window", "chunk": "chunks"}[span.kind] for span in spans)
    if getattr(config, "attn_logit_softcapping", None):
        words.append("soft cap")
    if config.model_type == "gpt_oss":
        words.append("sinks")
    if config.model_type == "mimo_v2_flash":
        words += ["sliding window", "sinks", "narrow values"]
    if hasattr(config, "qk_nope_head_dim"):
        words.append("latent keys and values")
    if config.model_type == "deepseek_v4":
        words += ["sliding window", "sinks", "compressed keys", "streams"]
    if config.model_type in WITH_INDEXERS:
        words.append("chosen keys")
    if target.cache_shape.recurrent is not None:
        words.append(WITH_STATES[config.model_type])
    if any("Experts" in type(module).__name__ for module in target.model.modules()):
        words.append("experts")
    return ", ".join(dict.fromkeys(filter(None, words))) or "-"


def where_it_runs(kind: str) -> tuple[str, str]:
    """Name what computes a published kind, on a CPU and on a GPU."""
    if ARCHITECTURES[kind].kernels_lack is None:
        return "kernels", "kernels"
    config = text_view(tiny_config(kind, has_wide_heads=True).to_dict())
    return path_on("cpu", config).name, path_on("cuda", config).name


def table() -> str:
    """Return `docs/models.md`."""
    rows = []
    for kind in ARCHITECTURES:
        target = tiny_target(kind)
        rows.append(_row(kind, asks_for(target), compare(target)))
    nested = ", ".join(f"`{kind}`" for kind in sorted(NESTED))
    same = ", ".join(f"`{kind}` as `{other}`" for kind, other in sorted(ALIASES.items()))
    return HEAD.replace("NESTED", nested).replace("SAME", same) + "\n".join(rows) + "\n" + FOOT + gguf_section()


def gguf_section() -> str:
    types = (each.name for each in READABLE.values())
    return GGUF.replace("GGUF_ARCHITECTURES", ", ".join(GGUF_KINDS)).replace("GGUF_TYPES", ", ".join(types))


def _row(kind: str, asked: str, found: Agreement) -> str:
    assert found.num_same_choices == found.num_rows, kind
    return f"| `{kind}` | {' | '.join(where_it_runs(kind))} | {asked} | {found.greatest_difference:.1e} |"


HEAD = """\
# Models that run here

A model runs if the `model_type` of its `config.json` (its kind) is in [the table](#the-kinds). `swiftbatch inspect
MODEL` says this before its weights are downloaded, and `swiftbatch doctor --model MODEL` compares it with
`transformers`, with its own weights.

Models of text and images run as texts, and lines with images are rejected:
NESTED.
Some kinds are another one by name:
SAME.

Not supported:

- recurrent layers other than those below, such as Mamba's first form; position biases; learned positions;
- adapters: merge them first;
- weights that lack a tensor of the model or have one too many, unfinished downloads, and matrices of zeros;
- rotary positions of the type `longrope` (Phi-4-mini, Phi-3.5) where our kernels do not run all of a model, and of the
  type `dynamic` other than Hunyuan's with a fixed `alpha`. With `longrope`, prompt and `max_tokens` together choose the
  short or the long factors once for a job; `swiftbatch extend` refuses a job that would need the other ones.

Layers that predict further tokens (MTP) are no part of the model: `auto`
[drafts with them](engines.md#the-engine-that-chooses) where it can.

## Models of 2023

Llama 2, Vicuna, YaRN-Llama-2, LWM-Text and llama-68m run in our kernels as they were published, and other Llamas of
their age: what their `config.json` leaves out is what `transformers` takes.

Their weights are in `pytorch_model.bin`, or in several files with an index. These load where a model has no
safetensors, one tensor at a time. `torch.load(weights_only=True)` reads them, which runs no code of the file. Refused:
files with anything but plain tensors by name, and files of torch before 1.6. The hub tells no sizes of `.bin` files'
tensors, so `inspect` of a hub id shows them only after the download.

If `tokenizer.model` is a model's only tokenizer, as with Vicuna, install the library that reads it, on every node:
`pip install '.[sentencepiece]'`.

## Layers that lack parts

Llama-Nemotron's layers were chosen one by one (NAS): some lack attention, some the MLP, and MLPs differ in width. Super
49B runs in our kernels as it was published, and so do layers without any part, as Ultra 253B has. Only layers that
attend take memory for keys and values. Refused are windows, sinks, a linear layer in place of attention or MLP, and
attention whose number of key heads differs between layers (51B). `transformers` has no class for this kind, so `doctor`
compares it with layers of its Llama.

## Latent attention

The heads of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash make their keys and values from one vector per position.
Caches and checkpoints hold only that vector and the rotary part of the keys: 54 KB per position of GLM-4.7-Flash
instead of 963 KB. `auto` drafts with trees for these models, and `--kv-dtype` is refused.

## Chosen keys

In DeepSeek V3.2 and GLM 5, 5.1 and 5.2 (DeepSeek sparse attention) an indexer scores all earlier positions of a row,
and the row attends to the best `index_topk` of them, 2,048 as published. Scores are float32, and of equal ones the
earlier position is chosen. Layers that GLM 5.2 calls `shared` take the choice of the last layer with an indexer.

- **Our kernels run them**, on CPUs and GPUs; `transformers` does not. `--kv-dtype` is refused.
- **Caches** hold the indexer's key behind the latent vector, in every layer: 110 KB per position of GLM 5.
- **Text longer than `index_topk`** costs an index score per position and the attention of `index_topk` positions.

MiniMax M3 chooses blocks of 128 positions for each head of keys, by the largest score in a block: a row's own and 15
others. Caches hold the index key as one more head: 152 KB per position, a tenth of it unused.

## Compressed keys

In DeepSeek V4 all heads share one key per position, which is its value, too. A row sees the keys of a window of 128
positions. In most layers it also sees pooled keys: of each 128 positions, or of each 4, of which an indexer chooses the
best `index_topk`. The state of a row has four streams (hyper-connections). A table of tokens chooses the experts of the
first layers.

- **Our kernels run them**, on CPUs alone, with weights in FP8 and experts in FP4 or NVFP4, as they are published.
- **Caches** hold what pooled keys are made of: 256 KB per position of V4 Flash, and 63 KB behind the newest positions.
- **Refused** are `--kv-dtype`, `--kv-offload`, adapters, and engines with trained parts.

## Heads of two widths

Gemma 4 (31B, 26B-A4B, 12B) runs in our kernels, also on GPUs. Caches and checkpoints hold what each layer has, 901 KB
per position of 31B, and behind the newest positions only the 82 KB of layers without a window. Engines with trained
parts and `--kv-offload` are refused, and on a GPU `--attention flash` and wide heads that are not twice as wide as the
others. With `--kv-dtype`, both halves of a wide head have a scale.

## Layers that share keys

In Gemma 4 E2B and E4B the last layers read keys and values of an earlier layer, so caches and checkpoints have none for
them: 18 KB per position of E2B, and 6 KB behind the newest positions. Each layer also adds an embedding of
its own for a token (per-layer embeddings). Their table has half of the weights: it stays in bf16 in a run in float32,
and a row reads one line of it per layer. On a GPU, it is in the GPU's memory.

## Values narrower than keys

MiMo-V2-Flash has heads of 192 with values of 128, and layers with windows have twice the heads of keys of others, and
sinks. A cache's rows are as wide as keys, so a sixth of it holds zeros: 267 KB per position, and 28 KB behind the
newest positions. Refused are engines with trained parts, `--kv-offload`, `--attention flash` and several GPUs a worker.

## Layers with states

Gated delta nets (Qwen3-Next, Qwen3.5), delta attention (Kimi Linear), Mamba-2 (Bamba, Falcon-H1, Granite 4 h,
Nemotron-H) and short convolutions (LFM2) have one state per job in place of keys and values per position. Our kernels
run all of them but Kimi Linear. Engines with trained parts are refused for models with states.

- **Memory.** `swiftbatch inspect` says how much a job's states take and how many jobs fit: 959 MB for a job of
  Qwen3.5-27B of any length, beside 66 KB per position of keys and values.
- **Checkpoints** hold the state at the boundary (154 MB for Qwen3.5-27B) beside keys and values. They are written once
  these have grown by as many bytes. A resume loads the state and reads up to 127 tokens and those since the checkpoint.
- **Prompts that begin alike** are copied up to the last boundary that they share.

## Quantized weights

A quantized checkpoint stands for the matrices of its format, computed in float32 and rounded once to the run's dtype.
So a run gives the tokens of the dequantized model, to the bit. Activations, keys and values are not quantized. If our
kernels run all of a model, weights stay packed in memory.

| format, in safetensors (for GGUF see [below](#gguf-files)) | what runs |
|---|---|
| FP8 as `fp8` (Qwen, DeepSeek, MiniMax, GLM) | e4m3 with a scale for each block of any size, or one per tensor |
| the same with other experts (DeepSeek V4) | these in FP4 (e2m1, a power of two for 32) or NVFP4 by ModelOpt |
| floats of `compressed-tensors` | FP8 per tensor, row or block; NVFP4; MXFP4 |
| integers of `compressed-tensors` | int8 per tensor, row or group; 2, 3, 4 or 8 bits, also with zeros or `actorder` |
| ModelOpt (`hf_quant_config.json`) | FP8 per tensor or row, NVFP4 (also as `W4A16_NVFP4`), both in one checkpoint |
| MXFP4 as `mxfp4` (gpt-oss) | the experts |
| GPTQ as `gptq` | 2, 3, 4 or 8 bits, first and second form, with `desc_act` as well |
| AWQ as `awq` | 4 bits in the order `gemm` |

Refused: all other formats, such as bitsandbytes, quark, hqq or torchao; unknown keys of a config; sparse weights;
rotations; parts that are missing, damaged or do not fit together.

`swiftbatch quantize MODEL --format int4 --output DIR` makes such a checkpoint of a plain model, also `int8` and `fp8`.
With `--text FILE` it says what that costs, in nats per token.

## The kinds

- "On a CPU", "on a GPU": `kernels` are our own for all of a forward; with `kernels attend` the layers of transformers
  multiply; `transformers` are its layers alone, which are slow on a GPU; `none` refuses the model.
- "Needs": what the kind needs beside plain attention to all positions.
- "Greatest difference" between our logits and those of transformers' own forward. Logits spread over about 10. All 300
  rows had the same best token.

The comparison: a tiny model with random weights in float32, 300 random tokens, windows and chunks of 100 positions, one
machine with AVX-512, attention in torch. The tests compare the attention of the [kernels](kernels.md) with every kind.
`python -m tests.worker.model.kind_parts > docs/models.md` writes this page.

| kind | on a CPU | on a GPU | needs | greatest difference |
|---|---|---|---|---|
"""
GGUF = """\

## Models in a bucket

`--model s3://our-bucket/models/NAME` runs a model's folder in an object store, and `gs://` and `az://` do, too. A name
that ends with `.gguf` is one file. Endpoint and credentials come from the environment of every node, as for
[runs](clouds.md); in the name they are refused, because a run keeps and shows it.

- **One download a node**, into the hub's cache (`HF_HUB_CACHE`, or `hub` in `HF_HOME`): only files that the model
  needs, up to 4 at a time. Other processes of the node wait. After `kill -9`, complete files stay, others begin again.
- **Versions.** Objects are compared by size and ETag each time. Downloaded files are named by their SHA-256, and
  workers check it while they load. If an object changed since `submit`, the run is refused and the file is named.
- **The driver downloads the weights**, also with `--address`, and so do `tail`, `extend` and `fork`: object stores have
  no SHA-256 of a file that was uploaded in parts. `inspect` reads only headers.

## GGUF files

`--model path/to/model.gguf` runs a file of llama.cpp; of a model in several files, name the first. `--model
org/repo:FILE.gguf` (or `hf:org/repo:FILE.gguf`, `org/repo@REVISION:FILE.gguf`) takes one file of a hub repository. A
folder with one GGUF file and no `config.json` means that file; with several, `submit` names them. The architectures:
GGUF_ARCHITECTURES.
The types of tensors:
GGUF_TYPES.
Others are refused by name, as are unknown metadata that may change a layer.

- **Tokens** are exactly those of a folder with the dequantized matrices: the numbers that the file's types define in
  float32, rounded once to `--dtype`. On a GPU that is a run with `--linear triton`: see
  [Packed weights](gpu.md#packed-weights). llama.cpp quantizes activations, so its tokens may differ; a run
  with `--linear int8` quantizes them likewise: [Rows in 8 bits](kernels.md#rows-in-8-bits).
- **Ends.** A text ends at the end tokens of the metadata, and at `<|im_end|>`, `<|eot_id|>`, `<end_of_turn>` and the
  like.
- **The tokenizer** is made from the file's vocabulary. Models `llama` (SentencePiece) and `gpt2` (bytes) run, with
  these names of `tokenizer.ggml.pre`: codeshell, command-r, dbrx, deepseek-r1-qwen, exaone, f2llmv2, falcon-h1,
  falcon3, gpt-2, gpt-4o, granite-docling, jais, jina-v5-nano, kanana2, kormo, lfm2, llama-bpe, llama-v3, llama3,
  llama4, megrez, midm-2.0, minerva-7b, minimax-m2, mpt, olmo, phi-2, pixtral, qwen2, qwen35, refact, smaug-bpe, smollm,
  starcoder, talkie, tekken, trillion. With another name, or none, convert the model again or use its safetensors.
- **Differences to llama.cpp's tokenizer**, where ours follows the model's own: `qwen2`, `deepseek-r1-qwen`, `mpt` and
  `olmo` compose characters first (NFC); `tekken`, `gpt-4o`, `kanana2`, `llama4`, `minimax-m2` and `talkie` count
  combining marks as letters. Tokens that only fill a vocabulary (`[PAD151700]`, type "unused") have no text.
- **Small files** made from the metadata (config, tokenizer, chat template) are written once, into `swiftbatch/gguf` in
  `$XDG_CACHE_HOME` or `~/.cache`. A worker with another GGUF file, or other small files, refuses to continue a run.
"""

FOOT = """
## Mistral's own tokenizer

Some of Mistral's models have no tokenizer but `tekken.json`. The library mistral-common reads it:
`pip install '.[mistral]'`, on every node. It needs a numpy below 2.4, so install without `-c constraints.txt`. A user's
text never becomes a control token. `chat_template_kwargs` have no effect, and structured outputs do not work with these
models. If there is a `tokenizer.json` beside it, `tekken.json` is not read.
"""

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(), end="")
