"""What has been said so far."""

from typing import Any

import attrs

from posttrainllm.adapters.loading.tokenizer import Tokenizer

__all__ = ["Conversation"]


@attrs.define(kw_only=True)
class Conversation:
    """Messages in turn; every reply continues the whole of them."""

    system: str | None = None
    template_args: dict[str, Any] = attrs.field(factory=dict)
    messages: list[dict[str, str]] = attrs.field(factory=list)
    """After the system message: "user" and "assistant" by turns."""

    def ask(self, text: str) -> None:
        """Add what the user says."""
        self.messages.append({"role": "user", "content": text})

    def reply(self, text: str) -> None:
        """Add what was answered; also when it was cut short."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the last message: it could not be answered."""
        self.messages.pop()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages.clear()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Ids of the conversation that the model is to continue.

        Args:
            tokenizer: the target's.

        Returns:
            The ids.

        Raises:
            CheckpointError: the chat template fails, for example since it knows no system message.
        """
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return tokenizer.encode_chat(first + self.messages, self.template_args)
