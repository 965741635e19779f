"""Sources, windows, ids and blocks: what is read, in which order, how far, and every refusal."""

import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import csprune.demo_texts
from csprune.corpus import Windows, check_fits, count_shared, read_windows
from csprune.demo_texts import DEMO_PIECE, pieces
from csprune.errors import InputError
from csprune.sources import TEXT_PIECE, read_documents, source_name

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer(*, bos: bool = False, merges: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, `<s>` (id 256) in front if `bos`; `merges` learnt from the demo text."""
    vocabulary = {character: number for number, character in enumerate(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if merges:
        trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=BYTES, show_progress=False)
        tokenizer.train_from_iterator(documents_of("demo"), trainer)
    if bos:
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if bos else None, model_max_length=100
    )


TOKENIZER = byte_tokenizer()


def documents_of(source: Any) -> list[str]:
    return [text for text in read_documents(source) if text is not None]


def text_ids(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)


def third(text: str) -> int:
    return int(hashlib.sha256(text[:256].encode()).hexdigest(), 16) % 3


def some_texts(count: int, length: int = 300) -> list[str]:
    return [(f"document {number} says " * 60)[:length] for number in range(count)]


def refusal(source: Any, tokenizer: Any = TOKENIZER, **options: Any) -> str:
    """The one line that reading `source` is refused with."""
    with pytest.raises(InputError) as caught:
        read_windows(tokenizer, source, **{"sequence_length": 8, **options})
    message = str(caught.value)
    assert message == " ".join(message.split()) and len(message) < 800
    return message


# Windows


@pytest.mark.parametrize("bos", [False, True])
def test_windows_are_the_first_tokens_and_the_same_shifted_by_one(bos: bool) -> None:
    texts = some_texts(5)
    tokenizer = byte_tokenizer(bos=bos)
    windows = read_windows(tokenizer, texts, sequence_length=20)
    for row, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        assert windows.input_ids[row].tolist() == ids[:20]
        assert windows.target_ids[row].tolist() == ids[1:21]
    assert windows.input_ids.dtype == windows.target_ids.dtype == windows.blocks.dtype == torch.int64
    assert windows.input_ids.is_contiguous() and windows.target_ids.is_contiguous()
    assert windows.bos is bos
    assert bool((windows.input_ids[:, 0] == 256).all()) is bos
    assert windows.tokenizer_size == 256 + bos
    assert len(windows) == 5 and windows.sequence_length == 20
    assert windows.source == "texts" and windows.block == "all"


def test_a_bos_token_that_is_not_added_is_not_reported() -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    assert tokenizer.bos_token_id == 256
    assert not read_windows(tokenizer, some_texts(3), sequence_length=20).bos


@pytest.mark.parametrize(("bos", "needed"), [(False, 21), (True, 20)])
def test_a_document_needs_one_token_more_than_the_window(bos: bool, needed: int) -> None:
    texts = ["", "x" * (needed - 1), "y" * needed, "z" * (needed + 1), " "]
    windows = read_windows(byte_tokenizer(bos=bos), texts, sequence_length=20)
    assert windows.document_ids == text_ids(texts[2:4])
    assert (windows.seen, windows.too_short) == (5, 3)


def test_windows_are_frozen_and_describe_themselves() -> None:
    windows = read_windows(TOKENIZER, some_texts(4), sequence_length=20, documents=3)
    with pytest.raises(FrozenInstanceError):
        windows.seen = 0  # pyright: ignore[reportAttributeAccessIssue]
    described = windows.describe()
    assert json.loads(json.dumps(described)) == described
    assert described == {
        "source": "texts",
        "block": "all",
        "documents": 3,
        "seen": 3,
        "too_short": 0,
        "unmatched": 0,
        "binary_files": 0,
        "sequence_length": 20,
        "bos": False,
        "tokenizer_size": 256,
        "identity": windows.identity,
    }


def test_identity_changes_with_any_token_or_document() -> None:
    windows = read_windows(TOKENIZER, some_texts(4), sequence_length=20)
    assert re.fullmatch("[0-9a-f]{64}", windows.identity)
    assert replace(windows, source="elsewhere", seen=9).identity == windows.identity
    inputs, targets = windows.input_ids.clone(), windows.target_ids.clone()
    inputs[2, 7] += 1
    targets[3, -1] += 1
    different = [
        replace(windows, input_ids=inputs),
        replace(windows, target_ids=targets),
        replace(windows, document_ids=(*windows.document_ids[:3], "0" * 16)),
        read_windows(TOKENIZER, some_texts(4), sequence_length=19),
        read_windows(TOKENIZER, some_texts(4)[::-1], sequence_length=20),
    ]
    assert len({windows.identity, *(other.identity for other in different)}) == 6


def test_no_warning_about_documents_longer_than_the_model(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # it does not propagate to the root logger
    caplog.set_level(logging.WARNING, "transformers")  # whatever other tests have set
    try:
        read_windows(byte_tokenizer(), ["x" * 300], sequence_length=20)
        assert not caplog.records
        byte_tokenizer()("x" * 300)  # control: it would have warned
        assert any("longer than" in record.getMessage() for record in caplog.records)
    finally:
        logger.removeHandler(caplog.handler)


def test_any_callable_like_a_tokenizer_will_do() -> None:
    class Plain:
        bos_token_id = None

        def __len__(self) -> int:
            return 256

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

    windows = read_windows(Plain(), ["abcdef"], sequence_length=5)  # pyright: ignore[reportArgumentType]
    assert windows.target_ids.tolist() == [[98, 99, 100, 101, 102]]


def test_word_level_tokenizer() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    windows = read_windows(fast, ["the cat saw the cat", "the cat"], sequence_length=4)
    assert windows.input_ids.tolist() == [[1, 2, 0, 1]]
    assert windows.target_ids.tolist() == [[2, 0, 1, 2]]
    assert windows.too_short == 1


# Blocks and ids


@SETTINGS
@given(st.lists(st.text(min_size=12, max_size=40), min_size=1, max_size=40), st.integers(1, 20))
def test_blocks_are_disjoint_cover_the_source_and_keep_its_order(texts: list[str], documents: int) -> None:
    def read(block: str, documents: int) -> Windows | None:
        try:
            return read_windows(TOKENIZER, texts, documents=documents, sequence_length=8, block=block)
        except InputError:
            return None

    def ids(windows: Windows | None) -> tuple[str, ...]:
        return () if windows is None else windows.document_ids

    expected = {number: [t for t in texts if third(t) == number] for number in range(3)}
    # With room for all, each document is in exactly the block that its hash says.
    calibration, confirmation = read("calibration", 100), read("confirmation", 100)
    assert ids(calibration) == text_ids(expected[0])
    assert ids(confirmation) == text_ids([t for t in texts if third(t)])
    assert calibration is None or set(calibration.blocks.tolist()) == {0}
    if confirmation is not None:
        assert confirmation.blocks.tolist() == [third(t) for t in texts if third(t)]
    assert count_shared(ids(calibration), ids(confirmation)) == 0
    assert len(ids(calibration)) + len(ids(confirmation)) == len(texts)
    # With less room, the first of each block, the confirmation blocks alike in size.
    assert ids(read("calibration", documents)) == text_ids(expected[0][:documents])
    confirmation = read("confirmation", documents)
    numbers = [] if confirmation is None else confirmation.blocks.tolist()
    for number, half in ((1, (documents + 1) // 2), (2, documents // 2)):
        taken = [d for d, b in zip(ids(confirmation), numbers, strict=True) if b == number]
        assert tuple(taken) == text_ids(expected[number][:half])
    # Used whole, the first documents whatever their hash, divided between blocks 1 and 2 by it.
    everything = read("all", documents)
    assert ids(everything) == text_ids(texts[:documents])
    assert everything is not None and everything.blocks.tolist() == [
        1 + int(hashlib.sha256(t[:256].encode()).hexdigest(), 16) % 2 for t in texts[:documents]
    ]
    for windows in (calibration, confirmation, everything):
        assert windows is None or windows.seen == len(windows) + windows.too_short


def test_each_block_gets_about_its_share() -> None:
    texts = some_texts(900)
    shares = [
        len(read_windows(TOKENIZER, texts, documents=900, sequence_length=8, block=block))
        for block in ("calibration", "confirmation")
    ]
    assert abs(shares[0] - 300) < 60 and sum(shares) == 900
    whole = read_windows(TOKENIZER, texts, documents=900, sequence_length=8)
    assert abs(int((whole.blocks == 1).sum()) - 450) < 60
    assert set(whole.blocks.tolist()) == {1, 2}


def test_the_first_256_characters_decide_the_block_and_all_of_them_the_id() -> None:
    beginning = "é" * 256  # 512 bytes: characters count
    alike = [beginning + str(number) for number in range(40)]
    different = [str(number) + beginning for number in range(40)]
    assert len({third(text) for text in different}) == 3  # control
    assert len({third(text) for text in alike}) == 1
    for texts, blocks in ((alike, 1), (different, 2)):
        windows = read_windows(TOKENIZER, texts, sequence_length=8)
        assert len(set(windows.blocks.tolist())) == blocks
        assert len(set(windows.document_ids)) == 40  # one character changes the id
        assert windows.document_ids == text_ids(texts)


def test_an_id_is_known_in_advance() -> None:
    windows = read_windows(TOKENIZER, ["abc"], sequence_length=2)
    assert windows.document_ids == ("ba7816bf8f01cfea",)  # the SHA-256 example of FIPS 180


def test_reading_twice_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts(50)))
    for block in ("all", "calibration", "confirmation"):
        first, second = (
            read_windows(byte_tokenizer(), str(path), documents=9, sequence_length=20, block=block)
            for _ in range(2)
        )
        assert first.describe() == second.describe()
        assert torch.equal(first.input_ids, second.input_ids)
        assert torch.equal(first.target_ids, second.target_ids)
        assert torch.equal(first.blocks, second.blocks)


def test_count_shared() -> None:
    a = read_windows(TOKENIZER, some_texts(6), sequence_length=8)
    b = read_windows(TOKENIZER, some_texts(9)[4:], sequence_length=8)
    assert count_shared(a, b) == count_shared(b, a.document_ids) == 2
    assert count_shared(a, a) == 6
    assert count_shared(a, []) == 0
    assert count_shared(["x", "x"], ["x", "x", "y"]) == 1  # documents, not occurrences


# How far is read


def until(count: int, texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:count]
    raise AssertionError("read further than needed")


@pytest.mark.parametrize("block", ["all", "calibration", "confirmation"])
def test_reading_stops_at_the_document_that_completes_the_windows(block: str) -> None:
    texts = ["short" if number % 4 == 0 else text for number, text in enumerate(some_texts(200))]
    whole = read_windows(TOKENIZER, texts, documents=10, sequence_length=8, block=block)
    needed = 1 + text_ids(texts).index(whole.document_ids[-1])
    stopped = read_windows(TOKENIZER, until(needed, texts), documents=10, sequence_length=8, block=block)
    assert stopped.describe() == whole.describe() and len(stopped) == 10
    with pytest.raises(AssertionError, match="further than needed"):  # control
        read_windows(TOKENIZER, until(needed - 1, texts), documents=10, sequence_length=8, block=block)


def test_what_follows_in_a_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in some_texts(3)) + "not JSON\n")
    assert len(read_windows(TOKENIZER, str(path), documents=3, sequence_length=8)) == 3
    assert "line 4" in refusal(str(path), documents=4)


def test_documents_of_a_full_block_are_not_counted() -> None:
    texts = [t for t in some_texts(60) if third(t) == 1]
    texts += [t for t in some_texts(60) if third(t) == 2]
    windows = read_windows(TOKENIZER, texts, documents=4, sequence_length=8, block="confirmation")
    assert (windows.seen, windows.too_short) == (4, 0)
    assert windows.blocks.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("block", ["all", "confirmation"])
def test_equal_blocks(block: str) -> None:
    texts = some_texts(300)
    windows = read_windows(TOKENIZER, texts, documents=40, sequence_length=8, block=block, equal_blocks=True)
    counts = [windows.blocks.tolist().count(number) for number in (1, 2)]
    assert counts == [20, 20] and windows.unmatched == 0
    # They are the first ones of each block, in the source's order.
    of_text = {text: 1 + int(hashlib.sha256(text[:256].encode()).hexdigest(), 16) % 2 for text in texts}
    if block == "confirmation":
        of_text = {text: third(text) for text in texts}
    firsts = [[t for t in texts if of_text[t] == number][:20] for number in (1, 2)]
    assert windows.document_ids == text_ids([t for t in texts if t in firsts[0] + firsts[1]])
    # Where the text runs out, the larger block is cut to the smaller one's size, and that is said.
    lopsided = firsts[0] + firsts[1][:7]
    cut = read_windows(TOKENIZER, lopsided, documents=40, sequence_length=8, block=block, equal_blocks=True)
    assert [cut.blocks.tolist().count(number) for number in (1, 2)] == [7, 7]
    assert cut.unmatched == cut.describe()["unmatched"] == 13 and cut.too_short == 0
    # Control: not asked for, they stay.
    assert len(read_windows(TOKENIZER, lopsided, documents=40, sequence_length=8, block=block)) == 27
    with pytest.raises(InputError, match="all 20 documents .* one of the two confirmation blocks"):
        read_windows(TOKENIZER, firsts[0], documents=40, sequence_length=8, block=block, equal_blocks=True)


def test_progress_is_told_of_every_window() -> None:
    calls: list[tuple[int, int]] = []
    texts = ["short", *some_texts(4)]
    read_windows(
        TOKENIZER,
        texts,
        documents=3,
        sequence_length=8,
        progress=lambda found, wanted: calls.append((found, wanted)),
    )
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


# Sources


def write_jsonl(path: Path, texts: Sequence[str], field: str) -> str:
    path.write_text("\n".join(json.dumps({"n": 1, field: text}) for text in texts))
    return f"{path}:{field}"


def write_parquet(path: Path, texts: Sequence[str], field: str) -> str:
    table = pyarrow.table({"n": list(range(len(texts))), field: list(texts)})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return f"{path}:{field}"


def write_folder(path: Path, texts: Sequence[str], field: str) -> str:
    for number, text in enumerate(texts):
        file = path / f"part{number // 10:02}" / f"{number:03}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(path)


def write_hub(path: Path, texts: Sequence[str], field: str) -> str:
    path.mkdir()
    write_jsonl(path / "data.jsonl", texts, field)
    return f"hf:{path}:::{field}"


def write_text(path: Path, texts: Sequence[str], field: str) -> str:
    path.write_text("\n \n\n".join(texts))
    return str(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.jsonl", write_jsonl),
        ("X.PARQUET", write_parquet),
        ("folder", write_folder),
        ("hub", write_hub),
        ("x.txt", write_text),
    ],
)
@pytest.mark.parametrize("field", ["text", "body"])
def test_every_source_gives_the_same_documents(
    tmp_path: Path, name: str, write: Callable[[Path, Sequence[str], str], str], field: str
) -> None:
    texts = some_texts(150, length=TEXT_PIECE)
    source = write(tmp_path / name, texts, field)
    assert documents_of(source) == texts
    windows = read_windows(TOKENIZER, source, documents=150, sequence_length=20)
    assert windows.source == source
    assert replace(windows, source="texts").describe() == (
        read_windows(TOKENIZER, texts, documents=150, sequence_length=20).describe()
    )
    if field == "text" and ".jsonl:" in source.lower() + ".parquet:":
        for short in (source.removesuffix(":text"), source.removesuffix("text")):
            assert documents_of(short) == texts


def test_a_path_object_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("demo"), ["from the folder"], "")
    assert documents_of(Path("demo")) == ["from the folder"]
    assert source_name(Path("demo")) == "demo"
    assert len(documents_of("demo")) > 100


def test_a_colon_in_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a:b.jsonl"
    write_jsonl(path, ["one"], "c:d")
    assert documents_of(f"{path}:c:d") == ["one"]
    assert "no field 'text'; there are: n, c:d" in refusal(str(path))


@SETTINGS
@given(
    st.lists(st.text(alphabet="ab \n", min_size=1).filter(str.strip), max_size=30),
    st.integers(1, 12),
)
def test_pieces_lose_nothing_and_are_long_enough(paragraphs: list[str], at_least: int) -> None:
    cut = list(pieces(paragraphs, at_least))
    assert "\n\n".join(cut) == "\n\n".join(paragraphs)
    assert len(cut) <= 1 or all(len(piece) >= at_least for piece in cut)
    # No piece but the last could have been cut earlier: its last paragraph was needed.
    starts = list(itertools.accumulate((len(piece) + 2 for piece in cut[:-1]), initial=0))
    ends = list(itertools.accumulate(len(paragraph) + 2 for paragraph in paragraphs))
    for start, piece in zip(starts, cut[:-1], strict=False):
        inner = [end - 2 - start for end in ends if start < end - 2 < start + len(piece)]
        assert all(length < at_least for length in inner)


def test_a_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    first, second = "a" * 300 + "  \n    indented", "b" * 300
    path.write_bytes(f"\ufeff\n\n{first}\r\n \t\r\n{second}\n\n\n{'c' * 500}\n\nshort".encode())
    assert documents_of(str(path)) == [f"{first}\n\n{second}", f"{'c' * 500}\n\nshort"]
    path.write_text("only this\nand this\n")
    assert documents_of(str(path)) == ["only this\nand this"]


def test_a_folder_is_read_recursively_sorted_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c", "c/1", ".hidden", ".git/x", "a/.x/y", "B"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"file {name}")
    (tmp_path / "c" / "up").symlink_to(tmp_path)  # leads back
    (tmp_path / "d").symlink_to(tmp_path / "b.txt")
    expected = ["B", "a/b/c", "a/z.md", "b.txt", "c/1", "b.txt"]
    assert documents_of(str(tmp_path)) == [f"file {name}" for name in expected]


def test_binary_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\r")
    (tmp_path / "b.txt").write_bytes("\ufeffText enough\r\nfor it".encode())
    windows = read_windows(TOKENIZER, str(tmp_path), sequence_length=8)
    assert windows.document_ids == text_ids(["Text enough\nfor it"])
    assert windows.binary_files == windows.describe()["binary_files"] == 1
    assert (windows.seen, windows.too_short) == (1, 0)


def test_a_parquet_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet(tmp_path / "x.parquet", some_texts(500), "text")
    sizes: list[int] = []
    original = pyarrow.parquet.ParquetFile.iter_batches

    def counted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in original(*arguments, **options):
            sizes.append(batch.num_rows)
            assert batch.schema.names == ["text"]
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    read_windows(TOKENIZER, source, documents=70, sequence_length=8)
    assert 70 <= sum(sizes) <= 128
    assert len(documents_of(source)) == 500 and max(sizes) <= 64


def test_hub_configuration_and_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [f"of {split}"], "text")
    assert documents_of(f"hf:{tmp_path}") == ["of train"]
    assert documents_of(f"hf:{tmp_path}::test") == ["of test"]
    assert documents_of(f"hf:{tmp_path}:default:test:text") == ["of test"]


def test_the_parts_reach_the_library_and_it_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Fake:
        @staticmethod
        def load_dataset(name: str, config: str | None, **options: Any) -> Iterator[dict[str, str]]:
            calls.append((name, config, options))
            return ({"text": "t", "body": "b"} for _ in range(1))

    monkeypatch.setattr(csprune.demo_texts.importlib, "import_module", lambda name: Fake)
    assert documents_of("hf:org/name") == ["t"]
    assert documents_of("hf:org/name:en:validation:body") == ["b"]
    assert calls == [
        ("org/name", None, {"split": "train", "streaming": True}),
        ("org/name", "en", {"split": "validation", "streaming": True}),
    ]


@SETTINGS
@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_string_is_a_document(text: str) -> None:
    """Lone surrogates, NULs, anything: made well-formed without touching the rest."""
    (document,) = documents_of([text])
    document.encode()  # control: fails on `text` if it holds a surrogate
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert document == re.sub("[\ud800-\udfff]", "\ufffd", joined)
    try:
        windows = read_windows(TOKENIZER, [text], sequence_length=1)
    except InputError:
        assert len(document.encode()) < 2
    else:
        assert windows.document_ids == text_ids([document])


def test_a_lone_surrogate_in_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a lone \\ud83d surrogate"}\n{"text": "a pair \\ud83d\\ude00 of"}')
    assert documents_of(str(path)) == ["a lone \ufffd surrogate", "a pair 😀 of"]
    assert len(read_windows(TOKENIZER, str(path), sequence_length=8)) == 2
    with pytest.raises((TypeError, UnicodeEncodeError)):  # control
        TOKENIZER("a lone \ud83d surrogate")


# The demo text


def normalised_paragraphs(text: str) -> list[str]:
    return [" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip()]


def test_no_paragraph_of_the_demo_occurs_twice() -> None:
    from pydoc_data.topics import topics

    documents = documents_of("demo")
    found = [p for document in documents for p in normalised_paragraphs(document)]
    assert len(found) == len(set(found))
    original = [p for topic in topics.values() for p in normalised_paragraphs(topic)]
    assert set(found) == set(original)  # nothing else is lost
    assert len(original) > len(set(original)) + 100  # control: the topics do repeat themselves
    assert normalised_paragraphs(documents[0])[0] == normalised_paragraphs(topics[min(topics)])[0]
    lengths = sorted(map(len, documents))
    assert lengths[len(lengths) // 10] >= DEMO_PIECE and lengths[len(lengths) // 2] < 800


def test_the_demo_code_is_whole_definitions_each_once() -> None:
    documents = documents_of("demo-code")
    assert len(documents) > 2000
    assert all(each.startswith(("def ", "class ", "async def ", "@")) for each in documents)
    assert sum(len(each) < DEMO_PIECE for each in documents) < len(documents) / 100
    # The functions of a module that everybody has, and nothing of what stands between them.
    textwrap = "\n".join(each for each in documents if "def dedent(" in each)
    assert "def dedent(" in textwrap and "_whitespace_only_re =" not in textwrap
    compiled = sum(_compiles(each) for each in documents)
    assert compiled > 0.97 * len(documents)
    assert not _compiles(documents[0][: len(documents[0]) // 2] + "(")  # control


def _compiles(source: str) -> bool:
    try:
        compile(source, "demo-code", "exec")
    except SyntaxError:
        return False
    return True


def test_the_demo_is_enough_for_the_default_protocol() -> None:
    """With a tokenizer trained on this very text, which spends fewer tokens on it than most."""
    for tokenizer in (TOKENIZER, byte_tokenizer(merges=4000)):
        calibration = read_windows(tokenizer, "demo", block="calibration")
        confirmation = read_windows(tokenizer, "demo", block="confirmation")
        assert calibration.blocks.tolist() == [0] * 128
        assert sorted(confirmation.blocks.tolist()) == [1] * 64 + [2] * 64
        assert calibration.sequence_length == confirmation.sequence_length == 128
        assert count_shared(calibration, confirmation) == 0


# Refusals


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"sequence_length": 0}, ["sequence length is 0"]),
        ({"documents": 0}, ["documents is 0"]),
        ({"documents": -3}, ["documents is -3"]),
        ({"block": "test"}, ["'test'", "all, calibration, confirmation"]),
    ],
)
def test_refused_options_come_before_reading(options: dict[str, Any], parts: list[str]) -> None:
    message = refusal(until(0, []), **options)
    assert all(part in message for part in parts)


@pytest.mark.parametrize(
    ("name", "content", "field", "parts"),
    [
        ("x.csv", "a,b", "", ["'.csv'", ".jsonl or .parquet"]),
        ("x", "a", "", ["no extension", ".jsonl or .parquet"]),
        ("x.json", "[]", "", ["'.json'"]),
        ("x.txt", "text", ":body", ["has no fields", "':body'"]),
        ("x.txt", "", "", ["no text in it"]),
        ("x.txt", "\n \n", "", ["no text in it"]),
        ("x.jsonl", "", "", ["no text in it"]),
        ("x.jsonl", "\n\n", "", ["no text in it"]),
        ("x.txt", b"fine\n\ncaf\xe9", "", ["line 3", "0xe9", "UTF-8"]),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "", ["line 2", "0xe9", "UTF-8"]),
        ("x.txt", "wide".encode("utf-16"), "", ["line 1", "UTF-8"]),
        ("x.jsonl", '{"text": "a"}\n\n{"text": ', "", ["line 3", "not valid JSON"]),
        ("x.jsonl", "[" * 100_000, "", ["line 1", "not valid JSON"]),
        ("x.jsonl", '{"text": ' + "1" * 5000 + "}", "", ["line 1"]),
        ("x.jsonl", '["a"]', "", ["line 1", "of type list", "JSON object"]),
        ("x.jsonl", '{"text": "a"}\n{"b": 1, "c": 2}', "", ["line 2", "'text'", "are: b, c"]),
        ("x.jsonl", "{}", "", ["line 1", "are: none"]),
        ("x.jsonl", '{"text": "a"}', ":body", ["line 1", "'body'", "are: text"]),
        ("x.jsonl", '{"text": null}', "", ["line 1", "null, not a string"]),
        ("x.jsonl", '{"n": 3}', ":n", ["line 1", "of type int, not a string"]),
        ("x.parquet", "PAR1 but no", "", ["not readable as parquet"]),
        ("x.parquet", "", "", ["not readable as parquet"]),
    ],
)
def test_refused_files(tmp_path: Path, name: str, content: str | bytes, field: str, parts: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = refusal(f"{path}{field}")
    assert str(path) in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("source", ["", "no/such.jsonl", "no/such.jsonl:body", "x\ny " * 5000])
def test_a_missing_file_is_refused(source: str) -> None:
    assert "no such file or folder" in refusal(source)


def test_a_missing_path_object_is_refused() -> None:
    assert "nowhere.txt: no such file or folder" in refusal(Path("nowhere.txt"))


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, mode: str) -> None:  # a mode of 0 would not stop root
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "x.txt"
    path.write_text("text")
    monkeypatch.setattr(Path, "open", denied)
    assert f"{path}: Permission denied" in refusal(str(path))
    assert f"{path}: Permission denied" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("column", "parts"),
    [
        ({"body": ["a" * 99]}, ["no field 'text'", "are: body"]),
        ({"text": ["a", None]}, ["row 2", "null, not a string"]),
        ({"text": [1, 2]}, ["row 1", "of type int, not a string"]),
        ({"text": pyarrow.array([], pyarrow.string())}, ["no text in it"]),
    ],
)
def test_refused_parquet_columns(tmp_path: Path, column: dict[str, Any], parts: list[str]) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table(column), path)
    message = refusal(str(path))
    assert str(path) in message and all(part in message for part in parts), message


def test_parquet_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = pyarrow.array([b"fine", b"caf\xe9"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    message = refusal(str(path))
    assert f"{path}, row 2" in message and "0xe9" in message


@pytest.mark.parametrize(
    ("files", "field", "parts"),
    [
        ({}, "", ["no text in it"]),
        ({".hidden": b"text"}, "", ["no text in it"]),
        ({"a.bin": b"\0\1", "b.bin": b"\0"}, "", ["no text in it", "2 binary files left out"]),
        ({"a.txt": b"caf\xe9"}, "", ["a.txt", "0xe9", "UTF-8"]),
        ({"a.txt": "wide".encode("utf-16")}, "", ["a.txt", "UTF-8"]),
        ({"a.txt": b"text"}, ":text", ["no fields", "':text'"]),
    ],
)
def test_refused_folders(tmp_path: Path, files: dict[str, bytes], field: str, parts: list[str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    message = refusal(f"{tmp_path}{field}")
    assert str(tmp_path) in message and all(part in message for part in parts), message


def test_a_dangling_link_and_a_pipe_in_a_folder_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "gone")
    assert f"{link}: neither a file nor a folder" in refusal(str(tmp_path))
    link.unlink()
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: neither a file nor a folder" in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:", ["no data set named"]),
        ("hf::config", ["no data set named"]),
        ("hf:{folder}:other", ["other"]),
        ("hf:{folder}::other", ["Bad split", "train"]),
        ("hf:{folder}:::other", ["record 1", "no field 'other'", "are: n, text"]),
        ("hf:{folder}:::n", ["record 1", "of type int, not a string"]),
        ("hf:{folder}/missing", ["missing", "check the parts"]),
    ],
)
def test_refused_hub_data_sets(tmp_path: Path, source: str, parts: list[str]) -> None:
    write_jsonl(tmp_path / "train.jsonl", ["text"], "text")
    message = refusal(source.format(folder=tmp_path))
    assert message.startswith("hf:") and all(part in message for part in parts), message


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(csprune.demo_texts.importlib, "import_module", missing)
    assert "'datasets': install it" in refusal("hf:name")
    assert "'pydoc_data': install it" in refusal("demo")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (None, "null"),
        (7, "of type int"),
        (b"bytes", "of type bytes"),
        (["fine", 7], "document 2 of the texts is of type int"),
        ([b"bytes"], "document 1 of the texts is of type bytes"),
        ([], "texts: no text in it"),
    ],
)
def test_refused_python_objects(source: Any, part: str) -> None:
    assert part in refusal(source)


def test_no_document_long_enough_is_refused_with_counts() -> None:
    message = refusal(["", "abcde", "abc"], sequence_length=5)
    assert "none of the 3 documents has the 6 tokens" in message and "longest has 5" in message
    texts = [text for text in some_texts(50) if third(text) == 0]
    message = refusal(texts, sequence_length=300, block="calibration")
    assert f"none of the {len(texts)} documents of the calibration block" in message
    assert f"none of its {len(texts)} documents falls into the confirmation block" in refusal(
        texts, block="confirmation"
    )


def test_errors_of_a_python_iterable_are_its_own() -> None:
    def broken() -> Iterator[str]:
        yield "fine"
        raise OSError("the iterable's own")

    with pytest.raises(OSError, match="the iterable's own"):
        read_windows(TOKENIZER, broken(), sequence_length=8)


def test_check_fits() -> None:
    windows = read_windows(TOKENIZER, ["abc~"], sequence_length=3)
    largest = int(windows.target_ids.max())
    assert largest not in windows.input_ids[0]  # the last target counts as well
    check_fits(windows, largest + 1, 3, "tiny")
    check_fits(windows, 10**6, None, "tiny")
    with pytest.raises(InputError, match=rf"^tiny: .*\(256 tokens\).* id {largest}.* {largest} emb"):
        check_fits(windows, largest, 3, "tiny")
    with pytest.raises(InputError, match=r"^tiny: sequence length 3 is more than the 2 positions"):
        check_fits(windows, largest + 1, 2, "tiny")
