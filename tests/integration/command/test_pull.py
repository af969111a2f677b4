"""`lockstep pull` and `lockstep serve ORG/NAME`, from a hub on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.v1 import tokenizer_pb2
from shared.model_files.missing_files import TIKTOKEN
from shared.model_files.model_dir import CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, WEIGHTS_INDEX
from shared.model_files.tiktoken_vocabulary import convert_vocabulary
from tests.support.cells.cell import start_cell
from tests.support.models.gguf_files import write_gguf
from tests.support.models.kimi_vocabulary import write_kimi_vocabulary
from tests.support.system.model_hub import TOKEN, Hub, Repository, run_model_hub
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_command, module_environment

pytestmark = pytest.mark.process

NAME = "acme/tiny-llama"
SHARD = "model-00001-of-00001.safetensors"
CONFIGURATION = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
# The library writes what it has read in pieces of 10 MiB.
LARGE = bytes(range(256)) * (24 << 12)
TEMPLATE = "additional_chat_templates/tool_use.jinja"
FILES = {CONFIG: CONFIGURATION, TOKENIZER: b"{}", TEMPLATE: b"{{ messages }}", WEIGHTS: b"weights"}
OTHERS = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"",
    "consolidated.safetensors": b"",
}


@dataclass
class Puller:
    """Runs `lockstep pull` with a cache of its own."""

    hub: Hub
    cache: Path

    def environment(self, **variables: str) -> dict[str, str]:
        own = {name: value for name, value in module_environment().items() if not name.startswith("HF_")}
        ours = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.cache), "NO_PROXY": "127.0.0.1"}
        return own | ours | variables

    @contextmanager
    def start(self, name: str = NAME, *flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        command = module_command("services.cli", "pull", name, *flags)
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, name: str = NAME, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(name, *flags, **variables) as process:
            stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(name, process.returncode, stdout, stderr)

    def directory(self, name: str = NAME, *flags: str, **variables: str) -> Path:
        """Where a pull says that it has put the model."""
        result = self.run(name, *flags, **variables)
        assert result.returncode == 0, result.stderr
        return Path(result.stdout.removesuffix("\n"))

    def refusal(self, name: str = NAME, **variables: str) -> str:
        """What a pull that fails says, without its progress."""
        result = self.run(name, **variables)
        assert (result.returncode, result.stdout) == (1, "")
        assert "Traceback" not in result.stderr
        return result.stderr.splitlines()[-1]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with run_model_hub() as hub:
        hub.repositories[NAME] = Repository(FILES | OTHERS)
        yield hub


@pytest.fixture
def puller(hub: Hub, tmp_path: Path) -> Puller:
    return Puller(hub, tmp_path / "cache")


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_only_what_is_served_is_downloaded(hub: Hub, puller: Puller) -> None:
    result = puller.run()
    assert (result.returncode, result.stderr.count("\n")) == (0, len(FILES))
    assert f"{NAME}: {WEIGHTS} (7 bytes)\n" in result.stderr
    assert contents(Path(result.stdout.removesuffix("\n"))) == FILES
    assert sorted(hub.requested) == sorted(FILES)
    assert hub.requested[-1] == WEIGHTS


def test_what_is_there_is_neither_downloaded_again_nor_needs_the_hub(hub: Hub, puller: Puller) -> None:
    directory = puller.directory()
    hub.requests.clear()
    assert puller.directory() == directory
    assert puller.directory(HF_HUB_OFFLINE="1") == directory
    assert puller.directory(HF_ENDPOINT=f"http://127.0.0.1:{free_port()}") == directory
    assert hub.requested == []


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, puller: Puller) -> None:
    hub.repositories[NAME].branch = "refs/pr/2"
    directory = puller.directory(f"{NAME}@refs/pr/2")
    assert puller.directory(f"{NAME}@{hub.repositories[NAME].commit}") == directory
    assert puller.refusal(f"{NAME}@v9") == f"error: {NAME} has no revision v9"


def test_a_shard_outside_the_directory_is_not_downloaded(hub: Hub, puller: Puller) -> None:
    index = json.dumps({"weight_map": {"w": "../../shard.safetensors"}}).encode()
    hub.repositories[NAME] = Repository(FILES | {WEIGHTS_INDEX: index, "../../shard.safetensors": b"shard"})
    assert "'../../shard.safetensors' is not a plain file name" in puller.refusal()


def test_shards_are_those_that_the_index_names(hub: Hub, puller: Puller) -> None:
    files = {name: content for name, content in FILES.items() if name != WEIGHTS}
    files |= {WEIGHTS_INDEX: json.dumps({"weight_map": {"w": SHARD}}).encode(), SHARD: b"shard"}
    hub.repositories[NAME] = Repository(files | OTHERS)
    assert contents(puller.directory()) == files


def test_a_connection_that_breaks_is_resumed(hub: Hub, puller: Puller) -> None:
    hub.repositories[NAME] = Repository(FILES | {WEIGHTS: LARGE})
    hub.cuts_after[WEIGHTS] = len(LARGE) * 3 // 4
    assert (puller.directory() / WEIGHTS).read_bytes() == LARGE
    first, second = [request.start for request in hub.requests if request.file == WEIGHTS]
    assert (first, second > 0) == (0, True)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_pull_that_was_ended_goes_on(hub: Hub, puller: Puller, signal_number: signal.Signals) -> None:
    hub.hangs_after[WEIGHTS] = 3
    with puller.start() as process:
        assert hub.has_hung.wait(PATIENCE_S)
        process.send_signal(signal_number)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal_number)
    assert "Traceback" not in stderr
    hub.hangs_after.clear()
    hub.requests.clear()

    assert contents(puller.directory()) == FILES
    assert hub.requested == [WEIGHTS]


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_that_is_not_the_hubs_is_deleted(hub: Hub, puller: Puller, name: str) -> None:
    hub.spoilt[name] = FILES[name][::-1]
    assert f"error: {NAME}: {name} is not what the hub says it is" in puller.refusal()
    assert puller.run(HF_HUB_OFFLINE="1").returncode == 1
    hub.spoilt.clear()
    assert contents(puller.directory()) == FILES


def test_a_gated_model_says_what_to_do(hub: Hub, puller: Puller) -> None:
    hub.repositories[NAME].is_gated = True
    assert puller.refusal() == (
        f"error: {NAME} is gated: accept its conditions at {hub.url}/{NAME}, and set HF_TOKEN to a token of the "
        "account that did"
    )
    assert contents(puller.directory(HF_TOKEN=TOKEN)) == FILES


def test_a_model_that_is_missing_is_told(hub: Hub, puller: Puller) -> None:
    assert puller.refusal("acme/none").startswith(f"error: there is no {hub.url}/acme/none, or it is private")


def test_a_hub_that_cannot_be_reached_is_told(puller: Puller) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert puller.refusal(HF_ENDPOINT=url).startswith(
        f"error: {url} cannot be reached, and no pull of {NAME} was complete: "
    )
    assert "no pull of" in puller.refusal(HF_HUB_OFFLINE="1")


def test_kimis_vocabulary_is_converted_and_kept(hub: Hub, puller: Puller, tmp_path: Path) -> None:
    write_kimi_vocabulary(tmp_path)
    vocabulary = {name: (tmp_path / name).read_bytes() for name in (TIKTOKEN, TOKENIZER_CONFIG)}
    assert convert_vocabulary(tmp_path)
    files = {name: content for name, content in FILES.items() if name != TOKENIZER} | vocabulary
    hub.repositories[NAME] = Repository(files | {"tokenization_kimi.py": b"raise SystemExit(9)"})
    directory = puller.directory()
    assert contents(directory) == files | {TOKENIZER: (tmp_path / TOKENIZER).read_bytes()}
    hub.requests.clear()
    assert puller.directory(HF_HUB_OFFLINE="1") == directory
    # What was made here is part of what must be there.
    (directory / TOKENIZER).unlink()
    assert contents(puller.directory()).keys() == {*files, TOKENIZER}
    assert hub.requested == []


def test_a_vocabulary_that_is_not_kimis_is_refused_before_the_weights(hub: Hub, puller: Puller) -> None:
    files = {CONFIG: CONFIGURATION, TIKTOKEN: b"YQ== 0\n", TOKENIZER_CONFIG: b"{}", WEIGHTS: b"weights"}
    hub.repositories[NAME] = Repository(files)
    assert "tokenizer_class is None: only tiktoken.model of TikTokenTokenizer" in puller.refusal()
    assert WEIGHTS not in hub.requested


def test_a_model_with_mistrals_own_vocabulary_alone_is_refused(hub: Hub, puller: Puller) -> None:
    hub.repositories[NAME] = Repository({CONFIG: CONFIGURATION, "tekken.json": b"{}", WEIGHTS: b"weights"})
    assert puller.refusal().startswith(
        f"error: {NAME} has no {TOKENIZER}; its vocabulary is in Mistral's own format (tekken.json), which is not read"
    )


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("pytorch_model.bin", "; its weights are in a format that can run code and is not read"),
        ("tiny.Q8_0.gguf", "; it has GGUF files, which `lockstep serve ORG/NAME/FILE.gguf` takes"),
        (
            "consolidated.safetensors",
            "; its weights are in Mistral's own format (consolidated*.safetensors), which is not read",
        ),
        ("README.md", ""),
    ],
)
def test_a_model_without_safetensors_is_refused(hub: Hub, puller: Puller, file: str, advice: str) -> None:
    hub.repositories[NAME] = Repository({CONFIG: CONFIGURATION, TOKENIZER: b"{}", file: b"x"})
    assert puller.refusal() == f"error: {NAME} has no {WEIGHTS} and no {WEIGHTS_INDEX}{advice}"
    assert hub.requested == []


def test_a_model_that_is_not_served_is_refused_before_its_weights_are_downloaded(hub: Hub, puller: Puller) -> None:
    hub.repositories[NAME] = Repository(FILES | {CONFIG: b'{"architectures": ["BertModel"]}'})
    assert "BertModel" in puller.refusal()
    assert WEIGHTS not in hub.requested


def test_a_tokenizer_s_files_are_downloaded_alone_and_the_weights_later(hub: Hub, puller: Puller) -> None:
    few = {name: content for name, content in FILES.items() if name != WEIGHTS}
    directory = puller.directory(NAME, "--without-weights")
    assert contents(directory) == few
    assert puller.directory(NAME, "--without-weights", HF_HUB_OFFLINE="1") == directory
    # They are not the model.
    assert puller.run(HF_HUB_OFFLINE="1").returncode == 1
    hub.requests.clear()
    assert contents(puller.directory()) == FILES
    assert hub.requested == [WEIGHTS]
    assert puller.directory(NAME, "--without-weights", HF_HUB_OFFLINE="1") == directory


def test_a_process_waits_until_another_one_has_downloaded_all(hub: Hub, puller: Puller) -> None:
    name = f"{NAME}@{hub.repositories[NAME].commit}"
    hub.hangs_after[WEIGHTS] = 3
    with puller.start(name, "--wait", HF_HUB_OFFLINE="1") as waiting:
        with puller.start(name):
            assert hub.has_hung.wait(PATIENCE_S)
            assert waiting.poll() is None
        hub.hangs_after.clear()
        directory = puller.directory(name)
        stdout, _ = waiting.communicate(timeout=PATIENCE_S)
    assert (waiting.returncode, stdout) == (0, f"{directory}\n")


def test_what_another_process_downloads_is_named_by_its_commit(puller: Puller) -> None:
    result = puller.run(f"{NAME}@main", "--wait")
    assert result.returncode == 2
    assert "--wait needs a commit" in result.stderr


def test_what_is_no_name_is_refused(puller: Puller) -> None:
    result = puller.run("tiny-llama")
    assert result.returncode == 2
    assert "a model's name is ORG/NAME or ORG/NAME@REVISION" in result.stderr


def test_a_cell_serves_a_model_by_its_name(
    hub: Hub, puller: Puller, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository(contents(tiny_model))
    for name, value in puller.environment().items():
        monkeypatch.setenv(name, value)
    with start_cell(Path(NAME)) as cell, cell.stub() as stub:
        assert f"serving {NAME} on" in cell.ready_line
        assert stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest()).model == NAME


def test_serve_says_why_a_name_cannot_be_had(hub: Hub, puller: Puller) -> None:
    command = module_command("services.cli", "serve", "models/none")
    result = subprocess.run(
        command, cwd=puller.cache.parent, env=puller.environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert f"error: models/none is not a directory, and as the name of a model: there is no {hub.url}" in result.stderr


def serve(puller: Puller, name: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep serve` with an unknown flag, so that it ends once it has the model."""
    command = module_command("services.cli", "serve", name, f"--listen=127.0.0.1:{free_port()}", "--worker.none=1")
    environment = puller.environment(**variables)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_gguf_file_is_downloaded_and_imported_by_its_kind(hub: Hub, puller: Puller, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    content = (tmp_path / "tiny.gguf").read_bytes()
    names = ["tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "old/tiny-Q8_0.gguf", "tiny-Q8_0.gguf", "mmproj-Q4_K_M.gguf"]
    hub.repositories[NAME] = Repository(dict.fromkeys(names, content) | {"README.md": b"#"})
    first = serve(puller, f"{NAME}:q4_k_m")
    assert f"{NAME}: tiny-Q4_K_M.gguf (" in first.stderr
    assert "import: the model is imported" in first.stderr
    assert hub.requested == ["tiny-Q4_K_M.gguf"]
    again = serve(puller, f"{NAME}:q4_k_m", HF_HUB_OFFLINE="1")
    assert (first.returncode, again.returncode) == (2, 2)
    assert "import:" not in again.stderr
    assert again.stderr.splitlines()[-1] == first.stderr.splitlines()[-1]
    assert "has 2 such files as acme/tiny-llama:Q8_0" in serve(puller, f"{NAME}:Q8_0").stderr
    assert "has no such file as acme/tiny-llama/none.gguf" in serve(puller, f"{NAME}/none.gguf").stderr
