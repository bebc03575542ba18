"""The target's own chat template: from conversations to token ids and a loss mask on the assistant's turns.

Templates rarely carry generation markers, and tools that rely on them produce masks of zeros. So spans come from
rendering prefixes: turn i is what the template adds between (messages[:i] with the generation prompt) and
messages[:i+1]. That holds only if both are prefixes of the whole text, which is checked for every turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remote.protocol.errors import preflight_error, usage_error
from trainer.data.dialects import Conversation, Message

# Parameters of transformers' apply_chat_template and what it passes on: no keywords of a template.
_TAKEN = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, the supervised spans in it as (start, end) characters, and the turns left out."""

    text: str
    spans: tuple[tuple[int, int], ...]
    turns_left_out: int


@dataclass(frozen=True)
class Encoded:
    """input_ids int32[S] and loss_mask uint8[S] up to the last supervised token, and the turns left out."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    turns_left_out: int


class ChatTokenizer:
    """A fast tokenizer with a chat template; special tokens come from the template alone."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        # Without transformers' wrapper, whose dictionaries of lists cost a third of the tokenizer's own time. A
        # tokenizer.json may say to cut or to pad; the wrapper switches that off at each call, and so do we.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template_kwargs = dict(template_kwargs or {})
        self.template_sha256 = hashlib.sha256(_template_text(tokenizer.chat_template).encode()).hexdigest()
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.tokenizer_sha256 = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def template(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the template's text of some messages.

        Raises:
            jinja2.TemplateError: the template refuses them, for instance roles that do not alternate.
        """
        return self._tokenizer.apply_chat_template(
            [message.to_dict() for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.template_kwargs,
        )

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the ids a target continues with its reply."""
        text = self.template(messages, tools, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply, without special tokens and with its spaces as they are."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the text of a conversation and where the assistant's turns stand in it."""
        messages, tools = conversation.messages, conversation.tools
        text = self.template(messages, tools)
        spans: list[tuple[int, int]] = []
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        for index in replies:
            head = self.template(messages[:index], tools, add_generation_prompt=True) if index else ""
            upto = self.template(messages[: index + 1], tools) if index + 1 < len(messages) else text
            if not (index and upto.startswith(head) and text.startswith(upto)):
                continue
            cut = conversation.finish == "length" and index == len(messages) - 1
            end = _content_end(upto, len(head), messages[index]) if cut else len(upto.rstrip())
            if end > len(head):
                spans.append((len(head), end))
        return Rendered(text, tuple(spans), len(replies) - len(spans))

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Return ids and loss mask of each conversation."""
        return self.tokenise([self.render(conversation) for conversation in conversations])

    def tokenise(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Return ids and loss mask of each text; those of more than one are tokenised in parallel."""
        if not rendered:
            return []
        encodings = self._backend.encode_batch([one.text for one in rendered], add_special_tokens=False)
        return [
            _supervise(np.array(encoding.ids, dtype=np.int32), _offsets(encoding.offsets), one)
            for encoding, one in zip(encodings, rendered, strict=True)
        ]


def load_tokenizer(
    path: Path, template_kwargs: Mapping[str, Any] | None = None, *, instead: str = "bring tokenised data"
) -> ChatTokenizer:
    """Load the tokenizer of a target directory; `template_kwargs` go to its chat template each time.

    Of templates with names `default` is taken, and `tool_use`, where there is one, for rows that have tools.

    Raises:
        DflashError: the directory or the tokenizer is missing, has no chat template, or is no fast tokenizer; `instead`
            says what does without one.
    """
    if not (path / "tokenizer_config.json").is_file():
        raise preflight_error(
            f"no tokenizer in {path}",
            cause="tokenizer_config.json is missing",
            hint="give the directory of the target model, with its tokenizer files",
        )
    from transformers import AutoTokenizer  # takes a second to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise preflight_error(
            f"no usable tokenizer in {path}",
            cause=str(problem).partition("\n")[0],
            hint="copy tokenizer.json and tokenizer_config.json of the model into it",
        ) from problem
    if not tokenizer.chat_template:
        raise preflight_error(
            f"the tokenizer in {path} has no chat template",
            cause="neither chat_template.jinja nor chat_template in tokenizer_config.json",
            hint=f"use an instruction-tuned target, or {instead}",
        )
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        raise preflight_error(
            f"the tokenizer in {path} has no chat template named default",
            cause=f"its templates: {', '.join(sorted(tokenizer.chat_template)) or 'none'}",
            hint=f"name one of them default in tokenizer_config.json, or {instead}",
        )
    if not tokenizer.is_fast:
        raise preflight_error(
            f"the tokenizer in {path} has no tokenizer.json",
            cause="only fast tokenizers tell which characters a token stands for",
            hint=f"convert it with transformers, or {instead}",
        )
    return ChatTokenizer(tokenizer, template_kwargs)


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Return the object of --chat-template-kwargs, e.g. {"enable_thinking": false}. Raises a usage error."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise usage_error(
            f"--chat-template-kwargs {text} is no JSON object", hint="for instance '{\"enable_thinking\": false}'"
        )
    taken = sorted(_TAKEN & values.keys())
    if taken:
        raise usage_error(
            f"--chat-template-kwargs cannot set {taken[0]}",
            cause="what goes into the template is decided here, or comes from the rows",
            hint="give keywords of the template's own, such as enable_thinking",
        )
    return values


def _template_text(template: str | Mapping[str, str]) -> str:
    """Return what a template's identity hangs on: its text, or all texts with their names."""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _content_end(upto: str, start: int, message: Message) -> int:
    """Return where a cut reply ends: behind its content, since the end-of-turn token is not the model's own.

    One that was cut while it thought has no content yet and ends behind its thoughts. A template may strip either; 0 if
    it is not found at all, so that the turn is left out.
    """
    last = message.content or message.extras.get("reasoning_content", "")
    for form in (last, last.strip()):
        position = upto.rfind(form, start) if form else -1
        if position >= 0:
            return position + len(form)
    return 0


def _offsets(pairs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return int64[n, 2]; twice as fast as numpy's own way through a list of tuples."""
    return np.fromiter(chain.from_iterable(pairs), dtype=np.int64, count=2 * len(pairs)).reshape(-1, 2)


def _supervise(ids: NDArray[np.int32], offsets: NDArray[np.int64], rendered: Rendered) -> Encoded:
    """Mask the tokens that lie in a span; one that straddles a span's edge was never generated as it stands."""
    loss_mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in rendered.spans:
        loss_mask |= ((offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > start)).astype(np.uint8)
    supervised = np.flatnonzero(loss_mask)
    # What follows the last label (a newline behind the end of the turn) would cost target time for nothing.
    length = int(supervised[-1]) + 1 if len(supervised) else 0
    return Encoded(ids[:length], loss_mask[:length], rendered.turns_left_out)
