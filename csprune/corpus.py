"""Token windows with stable ids, and the block (calibration, confirmation) each document is in."""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from csprune.errors import InputError
from csprune.sources import Source, read_documents, source_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCKS = ("all", "calibration", "confirmation")
ASSIGNING_CHARACTERS = 256  # versions of one document usually begin alike: they share a block


@dataclass(frozen=True, eq=False)  # comparing tensors by == has no single answer; see `identity`
class Windows:
    """The first tokens of documents, each long enough to fill a window and one more token.

    Attributes:
        input_ids: int64 [documents, sequence_length].
        target_ids: int64 [documents, sequence_length], the token after each input token.
        document_ids: first 16 hex digits of the SHA-256 of each document's whole text.
        blocks: int64 [documents], 0 calibration, 1 and 2 the two confirmation blocks.
        source: the source as given, `texts` for a Python iterable.
        block: what was asked for: `all`, `calibration` or `confirmation`.
        seen: documents of the asked-for block that were tried until enough were found.
        too_short: of these, left out because they have fewer than sequence_length + 1 tokens.
        bos: every window begins with the tokenizer's BOS token.
        tokenizer_size: `len(tokenizer)`, added tokens included.
        unmatched: long enough, but left out so that the two confirmation blocks are equal.
        binary_files: files of a folder left out because they hold no text.
    """

    input_ids: torch.Tensor
    target_ids: torch.Tensor
    document_ids: tuple[str, ...]
    blocks: torch.Tensor
    source: str
    block: str
    seen: int
    too_short: int
    bos: bool
    tokenizer_size: int
    binary_files: int = 0
    unmatched: int = 0

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_ids)

    @property
    def sequence_length(self) -> int:
        """Input tokens in a window."""
        return self.input_ids.shape[1]

    @property
    def identity(self) -> str:
        """SHA-256 (hex) over every token and document id: what a calibration belongs to."""
        digest = hashlib.sha256(f"{len(self)} {self.sequence_length}\n".encode())
        for ids in (self.input_ids, self.target_ids[:, -1]):
            digest.update(ids.cpu().contiguous().numpy().astype("<i8").tobytes())
        digest.update("\n".join(self.document_ids).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What a report or an artefact records of the text; plain values, ready for JSON."""
        return {
            "source": self.source,
            "block": self.block,
            "documents": len(self),
            "seen": self.seen,
            "too_short": self.too_short,
            "unmatched": self.unmatched,
            "binary_files": self.binary_files,
            "sequence_length": self.sequence_length,
            "bos": self.bos,
            "tokenizer_size": self.tokenizer_size,
            "identity": self.identity,
        }


def read_windows(
    tokenizer: "PreTrainedTokenizerBase",
    source: Source,
    *,
    documents: int = 128,
    sequence_length: int = 128,
    block: str = "all",
    equal_blocks: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Windows:
    """Reads the first `documents` documents of `source` that are long enough, and no further.

    A document gives one window: of `ids = tokenizer(text)["input_ids"]`, with whatever special
    tokens the tokenizer adds, `ids[:sequence_length]` is the input and `ids[1:sequence_length + 1]`
    the targets. A source with fewer documents gives fewer windows.

    Args:
        tokenizer: an ordinary transformers tokenizer.
        source: see `csprune.sources.read_documents`.
        documents: windows wanted, at least 1.
        sequence_length: tokens in a window, at least 1.
        block: `all` uses the source whole, its documents divided between confirmation blocks 1 and
            2; `calibration` uses only the third of the documents that their hash assigns there;
            `confirmation` takes half of `documents` (block 1 the odd one) from each of the two
            other thirds, in the order of the source.
        equal_blocks: as many documents of confirmation block 1 as of 2: half of `documents` each, or
            as many as the block with fewer has (the last ones of the other are left out).
        progress: called with (found, wanted) at the start and after each window found.

    Returns:
        The windows, the same for the same text on every run.

    Raises:
        InputError: a number below 1, an unknown block, a source that cannot be read, or no document
            long enough.
    """
    for name, value in (("documents", documents), ("sequence length", sequence_length)):
        if value < 1:
            raise InputError(f"{name} is {value}: give 1 or more")
    if block not in BLOCKS:
        raise InputError(f"block {block!r} is unknown: use one of {', '.join(BLOCKS)}")

    wanted = _wanted(block, documents, equal_blocks)
    found: Counter[int] = Counter()
    rows: list[torch.Tensor] = []
    document_ids: list[str] = []
    blocks: list[int] = []
    read = seen = longest = binary_files = 0
    if progress is not None:
        progress(0, documents)
    for text in read_documents(source):
        if text is None:
            binary_files += 1
            continue
        read += 1
        assigned = _assign(text, whole=block == "all")
        if found[assigned] >= wanted[assigned]:
            continue
        seen += 1
        ids = _token_ids(tokenizer, text)
        if len(ids) <= sequence_length:
            longest = max(longest, len(ids))
            continue
        found[assigned] += 1
        rows.append(torch.tensor(ids[: sequence_length + 1], dtype=torch.int64))
        document_ids.append(hashlib.sha256(text.encode()).hexdigest()[:16])
        blocks.append(assigned)
        if progress is not None:
            progress(len(rows), documents)
        if len(rows) == documents or found.total() == sum(wanted.values()):
            break
    name = source_name(source)
    if not rows:
        raise InputError(
            _nothing_found(name, block, read, seen, longest, binary_files, wanted=sequence_length + 1)
        )

    unmatched = 0
    if equal_blocks and block != "calibration":
        kept = _in_equal_blocks(blocks)
        if not kept:
            raise InputError(
                f"{name}: all {len(rows)} documents that are long enough fall into one of the two "
                "confirmation blocks, which are to be equal: give more documents"
            )
        unmatched = len(rows) - len(kept)
        rows = [rows[place] for place in kept]
        document_ids = [document_ids[place] for place in kept]
        blocks = [blocks[place] for place in kept]

    ids = torch.stack(rows)
    bos_id = tokenizer.bos_token_id
    return Windows(
        input_ids=ids[:, :-1].contiguous(),
        target_ids=ids[:, 1:].contiguous(),
        document_ids=tuple(document_ids),
        blocks=torch.tensor(blocks, dtype=torch.int64),
        source=name,
        block=block,
        seen=seen,
        too_short=seen - unmatched - len(rows),
        unmatched=unmatched,
        bos=isinstance(bos_id, int) and bool(ids[:, 0].eq(bos_id).all()),
        tokenizer_size=len(tokenizer),
        binary_files=binary_files,
    )


def count_shared(a: Windows | Sequence[str], b: Windows | Sequence[str]) -> int:
    """The number of different documents, by document id, that are in both."""
    first, second = (set(x.document_ids if isinstance(x, Windows) else x) for x in (a, b))
    return len(first & second)


def check_fits(windows: Windows, vocabulary: int, positions: int | None, name: str) -> None:
    """Refuses windows that the model cannot read.

    Args:
        windows: what is to be read.
        vocabulary: rows of the model's embedding.
        positions: the model's `max_position_embeddings`; None if it has no limit.
        name: the model's name, for the message.

    Raises:
        InputError: a token id without an embedding, or a window longer than the positions.
    """
    largest = int(max(windows.input_ids.max(), windows.target_ids.max()))
    if largest >= vocabulary:
        raise InputError(
            f"{name}: the tokenizer ({windows.tokenizer_size} tokens) gives token id {largest}, "
            f"but the model has {vocabulary} embedding rows: use the tokenizer that belongs to it"
        )
    if positions is not None and windows.sequence_length > positions:
        raise InputError(
            f"{name}: sequence length {windows.sequence_length} is more than the {positions} "
            f"positions of the model: use a sequence length of {positions} or less"
        )


def _wanted(block: str, documents: int, equal_blocks: bool) -> dict[int, int]:
    """How many documents of each block to take; `all` is limited by the total alone."""
    if equal_blocks and block != "calibration":
        return {0: 0, 1: documents // 2, 2: documents // 2}
    return {
        "all": {1: documents, 2: documents},
        "calibration": {0: documents, 1: 0, 2: 0},
        "confirmation": {0: 0, 1: (documents + 1) // 2, 2: documents // 2},
    }[block]


def _in_equal_blocks(blocks: list[int]) -> list[int]:
    """Places of the documents to keep: of each confirmation block as many as the smaller one has."""
    fewest = min(blocks.count(1), blocks.count(2))
    first, second = ([place for place, block in enumerate(blocks) if block == b][:fewest] for b in (1, 2))
    return sorted(first + second)


def _assign(text: str, *, whole: bool) -> int:
    """The block of a document, by its beginning: 0, 1 or 2; 1 or 2 if the source is used whole."""
    digest = hashlib.sha256(text[:ASSIGNING_CHARACTERS].encode()).digest()
    number = int.from_bytes(digest, "big")
    return 1 + number % 2 if whole else number % 3


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    # Only the beginning of a long document is used, so its length deserves no warning.
    quiet = {"verbose": False} if "verbose" in inspect.signature(tokenizer).parameters else {}
    return list(tokenizer(text, **quiet)["input_ids"])


def _nothing_found(
    name: str, block: str, read: int, seen: int, longest: int, binary_files: int, *, wanted: int
) -> str:
    if read == 0:
        left_out = f" ({binary_files} binary files left out)" if binary_files else ""
        return f"{name}: no text in it{left_out}: give text files, or one .jsonl or .parquet file"
    if seen == 0:
        return (
            f"{name}: none of its {read} documents falls into the {block} block: "
            "give more documents, or separate texts to calibrate and to evaluate on"
        )
    of_block = "" if block == "all" else f" of the {block} block"
    return (
        f"{name}: none of the {seen} documents{of_block} has the {wanted} tokens that a sequence "
        f"length of {wanted - 1} needs (the longest has {longest}): "
        "give longer documents or a smaller sequence length"
    )
