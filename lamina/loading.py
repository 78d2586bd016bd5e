"""`lamina.load`: from a path to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.models import family


def load(path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> Model:
    """Loads a folder (config.json and *.safetensors) or a .gguf file.

    dtype None is the checkpoint's own; device None is the first GPU where there is one, else the CPU.

    >>> model = load("SmolLM2-135M-Instruct.gguf")             # doctest: +SKIP
    >>> print(model.generate("The sky is").text[0])            # doctest: +SKIP
    """
    from lamina.checkpoint import config_dtype, fill, open_source
    from lamina.runtime.rehearse import rehearsal

    place = one_device(device)
    source = open_source(path)
    config = Config(source.config)
    refuse_quantized(config, path)
    cls = family(config.model_type)
    with torch.device("meta"):
        model = cls.build(config)
    dtype = config_dtype(source.config) if dtype is None else dtype
    building = rehearsal(source.config, dtype, place)
    fill(model, source, model.names, dtype=dtype, device=place, ignore=model.ignored)
    if building is not None:
        building.serves(model)
    model.tokenizer = source.tokenizer()
    model.generation_defaults = dict(source.generation_config)
    return model.eval()


def refuse_quantized(config: Config, path: str | Path) -> None:
    """Raises where the configuration says that weights are packed in a way of their own."""
    if method := config.get("quantization_config", {}).get("quant_method"):
        raise InputError(f"{path} holds weights quantized with {method!r}; Lamina reads plain ones and GGUF files")


def one_device(device: str | torch.device | None) -> torch.device:
    """The one device a model lives on."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device) or (isinstance(device, str) and ("," in device or device == "auto")):
        raise InputError(f"device={device!r}: a model lives on one device, such as 'cpu' or 'cuda:0'")
    return torch.device(device)
