"""Test the miniature's text and vocabulary: reproducible, disjoint splits, no unknown tokens."""

import sys

import pytest

from common.data import corpus
from common.errors import DataError


def test_same_documents_every_time(documents):
    assert corpus.documents() == documents
    assert sum(len(document.text) for document in documents) > corpus.MIN_CORPUS_CHARACTERS


def test_train_and_validation_share_nothing(documents):
    train, validation = corpus.split(documents)
    assert (
        len(train) + len(validation)
        == len(documents)
        == len({document.text for document in documents})
    )
    assert not set(train) & set(validation)
    source_of = {document.text: document.source for document in documents}
    assert not {source_of[text] for text in train} & {source_of[text] for text in validation}
    assert (
        corpus.VALIDATION_CHARACTERS
        <= sum(map(len, validation))
        < 1.2 * corpus.VALIDATION_CHARACTERS
    )


def test_works_without_pydoc_data(documents, monkeypatch):
    modules = [document for document in documents if not document.source.startswith("pydoc_data")]
    assert 0 < len(modules) < len(documents)
    # To read them again takes seconds.
    monkeypatch.setattr(corpus, "module_documents", lambda root: iter(modules))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # as on Debian's minimal Python
    assert corpus.documents() == modules


def test_too_little_text_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "latin.py").write_bytes(b'# \xe9\n"x"')
    with pytest.raises(DataError, match="1000000") as caught:
        corpus.documents(tmp_path)
    assert "python3-minimal" in caught.value.do


def test_texts_of_a_module(tmp_path):
    lines = [
        '"""' + "m" * 80 + '"""',
        "class A:",
        "    def f(self, x=1, *, y: int):",
        f'        """{"d" * 80}"""',
        "    # " + "c" * 80,
        "    #: more",
        "",
    ]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "mod.py").write_text("\n".join(lines))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text(lines[0])
    found = list(corpus.module_documents(tmp_path))
    assert {document.source for document in found} == {"package.mod"}
    assert [document.text for document in found] == [
        f"package.mod\n\n{'m' * 80}\n",
        f"package.mod.A.f(self, x=1, *, y: int)\n\n{'d' * 80}\n",
        f"{'c' * 80}\nmore\n",
    ]


def test_vocabulary_is_deterministic_and_lossless(documents, tmp_path):
    train, validation = corpus.split(documents)
    for name in ("a", "b"):
        corpus.train_sentencepiece(train, 2048, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tokenizer = corpus.load_sentencepiece(tmp_path / "a")
    assert (tokenizer.vocab_size(), tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id()) == (
        2048,
        0,
        1,
        2,
    )
    for text in [*validation, "Ω naïve\n\n\tdef f():\n    x  =  1\r\n", " leading and trailing "]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and min(ids) > 2  # neither unk nor bos nor eos


def test_a_tokenizer_of_another_kind_is_named(tmp_path):
    (tmp_path / "tiktoken").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(DataError, match="SentencePiece"):
        corpus.load_sentencepiece(tmp_path / "tiktoken")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="SentencePiece"):
        corpus.load_sentencepiece(tmp_path / "empty")
    with pytest.raises(DataError, match="No such file"):
        corpus.load_sentencepiece(tmp_path / "gone")


def test_a_long_line_is_cut_for_the_vocabulary_and_nothing_is_lost(tmp_path):
    words = "some words " * 1000
    characters = "xé€" * 3000  # no space
    short = "a" * corpus.LONGEST_LINE
    found = list(corpus._non_empty_lines([f"{words}\n\n{characters}\n{short}\n"]))
    assert "".join(found) == words + characters + short and found[-1] == short
    assert max(len(piece.encode()) for piece in found) <= corpus.LONGEST_LINE
    assert found[1].startswith((" words", " some"))
    corpus.train_sentencepiece([words * 10], 267, tmp_path / "model")
