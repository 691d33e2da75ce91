"""What Ollama's API says of models: of the one that is served."""

import datetime
import hashlib
from typing import Any

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.serve.settings import ServeSettings

__all__ = ["model_card", "model_details", "running_model"]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FOREVER_S = (2**63 - 1) // 10**9  # Ollama's, for what is never unloaded: the longest duration that it can count


def model_card(settings: ServeSettings, pair: Pair) -> dict[str, Any]:
    """The served model as GET /api/tags lists it.

    Args:
        settings: the server's.
        pair: what is served.

    Returns:
        Plain values, for JSON.
    """
    return {
        "name": settings.name,
        "model": settings.name,
        "modified_at": _at(settings.created),
        "size": pair.target.weight_bytes,
        "digest": hashlib.sha256(settings.fingerprint.encode()).hexdigest(),
        "details": _details(pair),
    }


def running_model(settings: ServeSettings, engine: Engine) -> dict[str, Any]:
    """The served model as GET /api/ps lists it.

    Args:
        settings: the server's.
        engine: what is stepped; its draft is a part of the size.

    Returns:
        Plain values, for JSON.
    """
    pair, forecast = engine.pair, engine.forecast
    card = model_card(settings, pair)
    size = sum(forecast.weights) + forecast.caches
    return {
        **{name: card[name] for name in ("name", "model", "digest", "details")},
        "size": size,
        "size_vram": size if pair.runtime.device == "gpu" else 0,
        "expires_at": _at(settings.created + _FOREVER_S),
        "context_length": settings.context,
    }


def model_details(settings: ServeSettings, pair: Pair) -> dict[str, Any]:
    """The served model as POST /api/show describes it.

    Args:
        settings: the server's.
        pair: what is served.

    Returns:
        Plain values, for JSON.
    """
    family = pair.target.family
    return {
        "modelfile": "",
        "parameters": f"num_ctx {settings.context}",  # Continue cuts its prompts to this
        "template": "",
        "details": _details(pair),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": settings.context,
            f"{family}.vocab_size": settings.vocab_size,
        },
        "capabilities": ["completion"],
        "modified_at": _at(settings.created),
    }


def _details(pair: Pair) -> dict[str, Any]:
    family = pair.target.family
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _DTYPES[pair.target.dtype],
    }


def _at(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
