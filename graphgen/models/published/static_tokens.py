"""The tokenizer.json of static embeddings, whatever other files say of it."""

from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json


class Tokens:
    """What tokenizer.json says. Raises GraphgenError if it is no file of a tokenizer."""

    def __init__(self, path: Path):
        self.path = path
        if not present(path):
            raise GraphgenError(
                f"{path} is missing, by which static embeddings read texts; copy it from the "
                "checkpoint"
            )
        self.written = read_json(path)
        model, added = self.written.get("model"), self.written.get("added_tokens")
        self.model: dict[str, Any] = model if isinstance(model, dict) else {}
        vocabulary = self.model.get("vocab")
        listed = added if isinstance(added, list) else []
        self.added = [token for token in listed if isinstance(token, dict)]
        try:
            known = (
                dict(vocabulary)
                if isinstance(vocabulary, dict)
                else {str(text): i for i, (text, _) in enumerate(vocabulary or [])}
            )
            known |= {str(token["content"]): token["id"] for token in self.added}
        except (TypeError, ValueError, KeyError) as error:
            problem = f"has no vocabulary: {error!r}"
            raise GraphgenError(f"{path} {problem}; download it again") from error
        if not known or not all(type(i) is int and i >= 0 for i in known.values()):
            raise GraphgenError(f"{path} has no vocabulary; download it again")
        self.vocabulary: dict[str, int] = known

    @property
    def unknown(self) -> int | None:
        """The token of what is in no vocabulary, if there is one."""
        if self.model.get("type") == "Unigram" or "unk_id" in self.model:
            found = self.model.get("unk_id")
            return found if type(found) is int else None
        return self.vocabulary.get(str(self.model.get("unk_token")))

    def median(self) -> int:
        """The median of the characters of a token."""
        return int(np.median([len(text) for text in self.vocabulary]))

    def truncation(self) -> int | None:
        """To how many tokens the file cuts a text, if it does."""
        found = self.written.get("truncation")
        length = found.get("max_length") if isinstance(found, dict) else None
        return length if type(length) is int and length > 0 else None

    def settings(self, length: int | None) -> dict[str, Any]:
        """The fields of a tokenizer_config.json that says no more than this file."""
        found = self.written.get("truncation")
        side = found.get("direction") if isinstance(found, dict) else None
        names = {"pad_token": ("[PAD]", "<pad>"), "unk_token": ("[UNK]", "<unk>")}
        known = {str(token["content"]) for token in self.added}
        own = {name: next((t for t in texts if t in known), None) for name, texts in names.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "truncation_side": str(side or "right").lower(),
            "added_tokens_decoder": {
                str(token["id"]): {n: x for n, x in token.items() if n != "id"}
                for token in self.added
            },
            **({} if length is None else {"model_max_length": length}),
            **{name: text for name, text in own.items() if text is not None},
        }
