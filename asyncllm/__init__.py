"""A language-model engine inside your asyncio application.

```python
from asyncllm import AsyncEngine

async with AsyncEngine.load("model.gguf") as engine:
    async for chunk in engine.generate("Tell me a story", max_tokens=256):
        print(chunk.text, end="", flush=True)
```
"""

from asyncllm.engine import AsyncEngine
from asyncllm.errors import (
    AsyncLLMError,
    CorruptCheckpointError,
    EngineClosedError,
    EngineDeadError,
    ModelLoadError,
    OptionsError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    StoreError,
    UnsupportedModelError,
)
from asyncllm.events import Choice, Chunk, Completion, FinishReason, Logprob, Timings, Usage
from asyncllm.generation import Generation
from asyncllm.info import EngineStats, LoadProgress, LoadStage, ModelInfo
from asyncllm.options import EngineOptions, SamplingParams
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.version import __version__

__all__ = [
    "AsyncEngine",
    "AsyncLLMError",
    "Choice",
    "Chunk",
    "Completion",
    "CorruptCheckpointError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "Generation",
    "LoadProgress",
    "LoadStage",
    "Logprob",
    "ModelInfo",
    "ModelLoadError",
    "OptionsError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "StoreError",
    "Timings",
    "Tokenizer",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]
