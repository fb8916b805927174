"""Every error the library raises on purpose."""


class AsyncLLMError(Exception):
    """Base of all errors raised by asyncllm."""


class ModelLoadError(AsyncLLMError):
    """The model cannot be loaded."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint is sound, but its architecture, format or tokenizer is not known here."""


class CorruptCheckpointError(ModelLoadError):
    """The checkpoint contradicts itself; the message names the field or tensor and its offset."""


class OptionsError(AsyncLLMError, ValueError):
    """An `EngineOptions` field has a value that is not accepted; the message names both."""


class RequestError(AsyncLLMError, ValueError):
    """A request's arguments, template or logits are at fault; no other request is touched."""


class PromptTooLongError(RequestError):
    """The prompt cannot fit the context or the K/V pool; the message has the numbers."""


class QueueFullError(AsyncLLMError):
    """`EngineOptions.max_waiting` requests wait already."""


class EngineClosedError(AsyncLLMError):
    """The engine was closed before the request ended, or before it was made."""


class EngineDeadError(AsyncLLMError):
    """The engine thread ended by itself; `__cause__` is what ended it."""


class StoreError(AsyncLLMError):
    """The block store's file cannot be used."""
