import errno
import multiprocessing
import os
import shutil
import signal
import time

import pytest

from scalerun.data.text import token_cache
from scalerun.data.text.token_cache import PreparationStopped, TokenCache
from scalerun.data.text.token_file import TokenFileWriter
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.errors import UserError

LINES = b"".join(b'{"text": "document %d \xc3\xa9"}\n' % i for i in range(100))


@pytest.fixture
def cache(tmp_path):
    def make(tokenizer=None, **options):
        return TokenCache(tmp_path / "cache", tokenizer or ByteTokenizer(), **options)

    return make


@pytest.fixture
def count_builds(monkeypatch):
    builds = []
    build = TokenCache._build

    def counting(self, file, *arguments):
        builds.append(file.name)
        build(self, file, *arguments)

    monkeypatch.setattr(TokenCache, "_build", counting)
    return builds


def token_files(cache):
    return sorted(cache.folder.glob("*.tokens"))


def test_tokens_are_those_of_the_tokenizer_with_an_end_behind_each(cache, text_file):
    file = text_file('{"text": "é"}\n\n{"text": ""}\n{"text": "ab"}'.encode())
    tokens = cache().load(file)
    end = ByteTokenizer().dictionary.eos
    assert tokens.tokens.tolist() == [0xC3, 0xA9, end, 0x61, 0x62, end]
    assert tokens.document_bytes.tolist() == [2, 2]
    assert (tokens.counts.lines, tokens.counts.blank, tokens.counts.empty) == (4, 1, 1)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "json"])
def test_batches_of_documents_do_not_change_tokens(
    cache, text_file, monkeypatch, kind, sentencepiece_tokenizer, json_tokenizer
):
    tokenizer = {
        "bytes": ByteTokenizer(), "sentencepiece": sentencepiece_tokenizer, "json": json_tokenizer,
    }[kind]  # fmt: skip
    whole = cache(tokenizer, num_threads=2).load(text_file(LINES))
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 40)
    token_files(cache())[0].unlink()
    parts = cache(tokenizer).load(text_file(LINES))
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert parts.ends.tolist() == whole.ends.tolist()


def test_a_file_is_tokenised_once(cache, text_file, count_builds):
    file = text_file(LINES)
    for _ in range(3):
        cache().load(file)
    assert count_builds == ["web.jsonl"]


def test_changed_content_of_equal_size_is_tokenised_anew(cache, text_file, count_builds):
    before = cache().load(text_file(LINES)).tokens.tolist()
    after = cache().load(text_file(LINES.replace(b"document 7 ", b"DOCUMENT 7 "))).tokens.tolist()
    assert len(after) == len(before)
    assert after != before
    assert len(count_builds) == 2


def test_a_moved_copy_of_the_text_uses_the_cache(cache, text_file, count_builds):
    cache().load(text_file(LINES, "here/web.jsonl"))
    cache().load(text_file(LINES, "there/web.jsonl"))
    assert len(count_builds) == 1


def test_another_tokenizer_gets_its_own_file(cache, text_file, json_tokenizer):
    file = text_file(LINES)
    cache().load(file)
    cache(json_tokenizer).load(file)
    assert len(token_files(cache())) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "header"])
def test_a_damaged_cache_is_made_again(cache, text_file, count_builds, damage):
    file = text_file(LINES)
    tokens = cache().load(file).tokens.tolist()
    (path,) = token_files(cache())
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[5000] ^= 4
    elif damage == "header":
        content[20] ^= 4
    else:
        del content[0 if damage == "empty" else -100 :]
    path.write_bytes(content)
    assert cache().load(file).tokens.tolist() == tokens
    assert len(count_builds) == 2


def test_the_checksum_is_compared_once_while_the_file_stays(cache, text_file, monkeypatch):
    file = text_file(LINES)
    cache().load(file)
    monkeypatch.setattr("scalerun.data.text.token_file.TokenFile.verify", lambda self: 1 / 0)
    cache().load(file)
    os.utime(token_files(cache())[0])
    with pytest.raises(ZeroDivisionError):
        cache().load(file)


def test_bad_records_stop_even_when_another_run_skipped_them(cache, text_file, count_builds):
    file = text_file(LINES + b"{\n")
    tokens = cache(skip_bad_records=True).load(file)
    assert [record.line for record in tokens.quarantined] == [101]
    with pytest.raises(UserError, match=r"web\.jsonl:101: not JSON"):
        cache().load(file)
    assert cache(skip_bad_records=True).load(file).counts.quarantined == 1
    assert len(count_builds) == 2


def test_stopping_leaves_neither_a_file_nor_a_lock(cache, text_file, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 40)
    answers = iter([False, False, True])
    with pytest.raises(PreparationStopped):
        cache().load(text_file(LINES), lambda: next(answers))
    assert {path.suffix for path in cache().folder.iterdir()} == {".lock"}
    assert cache().load(text_file(LINES)).num_documents == 100


def test_a_text_file_that_changes_meanwhile_is_refused(cache, text_file):
    file = text_file(LINES)
    cached = cache()
    batches = ByteTokenizer.encode_batch

    class Slow(ByteTokenizer):
        def encode_batch(self, texts, **options):
            file.path.write_bytes(LINES + LINES)
            return batches(self, texts)

    cached.tokenizer = Slow()
    with pytest.raises(UserError, match="changed while it was read"):
        cached.load(file)
    assert token_files(cached) == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "Read-only file system")],
)
def test_a_disk_that_takes_nothing_more_is_named_and_nothing_remains(
    cache, text_file, monkeypatch, number, reason
):
    def fail(self, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TokenFileWriter, "_write", fail)
    with pytest.raises(UserError, match=rf"cannot be written to: {reason}; .* --cache-dir"):
        cache().load(text_file(LINES))
    assert {path.suffix for path in cache().folder.iterdir()} == {".lock"}


def test_a_cache_that_is_deleted_is_made_again_and_its_run_folder_is_not(
    tmp_path, text_file, monkeypatch
):
    monkeypatch.setattr("scalerun.data.text.digests.SETTLED_NS", 0)
    cache = TokenCache(tmp_path / "run/cache", ByteTokenizer())
    first = cache.load(text_file(LINES)).tokens.tolist()
    shutil.rmtree(tmp_path / "run/cache")
    assert cache.load(text_file(LINES)).tokens.tolist() == first
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="run with the token cache is gone: it was deleted or"):
        cache.load(text_file(LINES))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, text_file):
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"token cache .* cannot be written to: File exists"):
        TokenCache(tmp_path / "cache", ByteTokenizer())


def test_long_and_strange_corpus_names_fit_a_file_name(cache, text_file):
    assert cache().load(text_file(LINES, "ü" * 100 + " :.jsonl")).num_documents == 100


def test_text_is_found_without_reading_only_when_it_is_remembered(cache, text_file, monkeypatch):
    monkeypatch.setattr("scalerun.data.text.digests.SETTLED_NS", 0)
    file, cached = text_file(LINES), cache()
    assert cached.peek(file) is None
    cached.load(file)
    assert cached.peek(file).num_documents == 100


def load_slowly(folder, file, builds):
    class Slow(ByteTokenizer):
        def encode_batch(self, texts, **options):
            builds.put(os.getpid())
            time.sleep(0.2)
            return super().encode_batch(texts)

    TokenCache(folder, Slow()).load(file)


def test_one_of_several_processes_tokenises_and_the_others_wait(tmp_path, text_file):
    context = multiprocessing.get_context("fork")
    builds, file = context.Queue(), text_file(LINES)
    processes = [
        context.Process(target=load_slowly, args=(tmp_path / "cache", file, builds))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    builds.get(timeout=5)
    assert builds.empty()


def test_a_killed_process_frees_the_lock_and_its_remains_are_removed(tmp_path, text_file, cache):
    context = multiprocessing.get_context("fork")
    builds, file = context.Queue(), text_file(LINES)
    process = context.Process(target=load_slowly, args=(tmp_path / "cache", file, builds))
    process.start()
    builds.get(timeout=20)
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert len(list((tmp_path / "cache").glob(".*.tmp"))) == 1
    assert cache().load(file).num_documents == 100
    assert not list((tmp_path / "cache").glob(".*.tmp"))
