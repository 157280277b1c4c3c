"""Conversations as plain data: messages, and what else a chat template reads beside them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from graphgen.errors import GraphgenError

Conversation: TypeAlias = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Messages, or an object with `messages`, `tools` and whatever else the template reads."""

CHAT = ("messages", "tools", "documents", "chat_template_kwargs")
"""The columns of a conversation: objects or lists of them, or texts that are such as JSON."""

SHARED = "conversations"
"""What the column of messages is called whose fields are `from` and `value`."""

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates call the reasoning of a message; transformers fills in the first two."""


def parts_of(conversation: Conversation, where: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, and what else the template reads, as plain data."""
    given: dict[str, Any] = {"messages": conversation}
    if isinstance(conversation, Mapping):
        given = dict(conversation)
    messages = _checked(given.pop("messages", None), where)
    more = given.pop("chat_template_kwargs", None)
    if more is not None and not isinstance(more, Mapping):
        raise GraphgenError(f"{where}: chat_template_kwargs is {more!r:.60}; give an object")
    given |= more or {}
    for name in ("tools", "documents"):
        value = given.get(name)
        listed = isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value)
        if value is not None and not listed:
            raise GraphgenError(f"{where}: {name} is {value!r:.60}; give a list of objects")
    return messages, _plain(given, where)


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    """Copies of messages without what is null; the assistant's reasoning has each name."""
    if not isinstance(messages, list | tuple):
        raise GraphgenError(f"{where}: messages are {messages!r:.40}; give a list of them")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise GraphgenError(
                f"{where}: a message is {message!r:.60}; give objects with `role` and `content`"
            )
    found: list[dict[str, Any]] = [
        {name: value for name, value in message.items() if value is not None}
        for message in _plain(messages, where)
    ]
    for i, message in enumerate(found):
        thought = next((message[n] for n in THOUGHTS if n in message), None)
        if thought is not None:
            found[i] = {"thinking": thought, **message, "reasoning_content": thought}
    return found


def _plain(value: Any, where: str) -> Any:
    """A copy that is plain data, so that a template can call no method of the caller's objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphgenError(
            f"{where}: a conversation has to be as in JSON, but {first_line(error)}"
        ) from error


def of_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """What a template reads of a row, and how many of the messages are only a prompt, if given.

    A prompt and its completion may both be messages, and those of `conversations` have `from` and
    `value` instead of role and content.
    """
    given = {name: value for name, value in row.items() if value not in (None, "")}
    prompt = given.pop("prompt", None)
    if SHARED in given:
        names = {"from": "role", "value": "content"}
        shared = given.pop(SHARED)
        given["messages"] = [
            {names.get(n, n): x for n, x in one.items()} if isinstance(one, Mapping) else one
            for one in (shared if isinstance(shared, list) else [shared])
        ]
    if prompt is not None:
        answer = given.pop("completion", None)
        given["messages"] = [
            *(prompt if isinstance(prompt, list) else [prompt]),
            *(answer if isinstance(answer, list) else [answer]),
        ]
    return given, len(prompt) if isinstance(prompt, list) else None


def is_messages(value: Any) -> bool:
    """Whether a column holds messages, and no text."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def nested(value: Any) -> Any:
    """A column of a conversation, from JSON as a text, or from a table.

    In a table, all objects have the fields of each, and nulls stand for those that are not there;
    only the content of a message may be a null itself.
    """
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # which the template refuses
    if isinstance(value, Mapping):
        kept = {
            n: x for n, x in value.items() if x is not None or (n == "content" and "role" in value)
        }
        return {name: nested(x) if not isinstance(x, str) else x for name, x in kept.items()}
    if isinstance(value, list):
        return [x if isinstance(x, str) else nested(x) for x in value]
    return value


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error) or "no reason").splitlines()[0]
