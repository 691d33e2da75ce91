"""What is kept in the user's cache: written whole or not at all."""

from pathlib import Path

import pytest

from posttrainllm.adapters.loading import blas, nvrtc
from posttrainllm.adapters.user_cache import user_cache, write_whole


@pytest.mark.parametrize(("content", "expected"), [("ä\n", "ä\n".encode()), (b"\xff\x00\r\n", b"\xff\x00\r\n")])
def test_text_and_bytes_are_written_as_they_are_and_replace_what_was_there(tmp_path, content, expected):
    file = tmp_path / "a" / "file"
    for _ in range(2):
        assert write_whole(file, content) is None
        assert file.read_bytes() == expected
    assert list(file.parent.iterdir()) == [file]


def test_what_cannot_be_put_in_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "file" / "in the way").mkdir(parents=True)
    assert write_whole(tmp_path / "file", b"x").startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    (tmp_path / "text").write_text("no folder")
    assert write_whole(tmp_path / "text" / "x", "x").startswith(f"{tmp_path / 'text'}: ")


def test_a_compiled_kernel_is_kept_and_taken_again(tmp_path, monkeypatch):
    class Library:
        @staticmethod
        def nvrtcVersion(major, minor):  # noqa: N802 # as NVRTC names it
            major._obj.value, minor._obj.value = 13, 0

    compiled = []
    monkeypatch.setattr(nvrtc, "_library", lambda: Library)
    monkeypatch.setattr(nvrtc, "_compile", lambda _, source, options: compiled.append(source) or b"\x7fELF cubin")
    for _ in range(2):
        assert nvrtc.compile_cuda("source", ["-x"], tmp_path / "kernels") == b"\x7fELF cubin"
    assert compiled == ["source"]
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.suffix == ".cubin"
    kept.write_bytes(b"")  # torn
    assert nvrtc.compile_cuda("source", ["-x"], tmp_path / "kernels") == kept.read_bytes() == b"\x7fELF cubin"
    assert compiled == ["source", "source"]
    (tmp_path / "text").write_text("no folder")
    assert nvrtc.compile_cuda("source", ["-x"], tmp_path / "text") == b"\x7fELF cubin"  # kept nowhere


def test_without_a_home_the_shim_is_built_for_this_process(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(blas, "_process_folder", lambda: str(tmp_path))
    monkeypatch.setattr(blas, "_compile", lambda source, target: target)
    assert user_cache("blas") is None
    assert blas._build_shim().parent == tmp_path
