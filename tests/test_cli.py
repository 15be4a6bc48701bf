"""The command line: processes, exit codes, output."""

from __future__ import annotations

import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from builder import cli, commands
from builder.cli import main, parse
from builder.commands import VERBS, output
from builder.commands.build_one import fused_operators
from builder.common.distribution import DISTRIBUTION
from builder.serving.load.record import read
from builder.serving.server.triton import TritonServer, free_ports
from tests.reports import REPORT
from tests.served.statistics import TRIES

BUILD_REPO = str(Path(sys.executable).with_name("build-repo"))
PROGRAM = """
import atexit, sys, threading, time, types
from builder import cli

class Loaded(types.ModuleType):
    def __del__(self):
        print("taken down")

sys.modules[sys.argv[1]] = Loaded(sys.argv[1])
atexit.register(print, "at the end")
last = threading.Thread(target=lambda: time.sleep(0.2) or print("thread", end=", "))
cli._run = lambda arguments: print("done", end=", ") or last.start() or 3
sys.exit(cli.main())
"""


def _run(*arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUILD_REPO, *arguments], capture_output=True, text=True, check=False, timeout=1000, input=input
    )


@pytest.mark.slow
def test_build_from_a_models_yaml_then_check(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One model of a file is built, reported as JSON on standard output and nothing else, and passes `check`."""
    path = tmp_path / "models.yaml"
    output = tmp_path / "model_repository"
    path.write_text(
        f"defaults: {{output: {output}}}\nmodels:\n  - model: {checkpoint('topics')}\n    name: topics\n"
        "    max_batch_size: 8\n    serving: {metadata: {owner: me}, queue: {max_size: 32}}\n"
    )
    built = _run(str(path), "--json")
    assert built.returncode == 0, built.stderr
    report = json.loads(built.stdout)
    assert report["task"] == "text-classification"
    assert report["attention"] == {"fused": 2, "layers": 2}
    assert [measured["name"] for measured in report["ladder"]] == ["PyTorch fp32", "fp32"]
    assert report["ladder"][1]["error"] < 1e-4
    assert "✓ verify" in built.stderr
    config = (output / "topics" / "config.pbtxt").read_text()
    assert "max_batch_size: 8" in config
    assert "max_queue_size: 0" in config, "Triton's batcher would pause"
    assert json.loads((output / "topics" / "1" / "serving.json").read_text())["queue"] == 32
    assert 'key: "owner"' in config
    assert json.loads((output / "topics" / "build.json").read_text()) == report
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["check", str(output)]) == 0
    (output / "topics" / "1" / "serving.json").write_text("{}")
    (output / "topics" / "1" / "model.onnx").unlink()
    assert main(["check", str(output)]) == 1
    assert main(["check", str(tmp_path / "absent")]) == 1
    shown = capfd.readouterr().err
    assert "(TR101)" in shown, "a finding of the whole repository names no file"
    assert "serving.json is not the file that was built" in shown
    assert "1/model.onnx is missing" in shown


def test_build_names_the_operators_of_a_model_without_attention() -> None:
    """Regression: a model of states alone printed none of its fused operators."""
    attending = replace(REPORT, attention={"fused": 2, "layers": 2}, operators={"GroupQueryAttention": 2})
    assert fused_operators(replace(REPORT, operators={"LinearAttention": 2})) == "fused operators: 2 LinearAttention"
    assert fused_operators(attending) == "attention fused in 2 of 2 layers; 2 GroupQueryAttention"
    assert not fused_operators(REPORT)


@pytest.mark.parametrize(("width", "turned"), [(120, False), (60, True), (20, False)])
def test_table_too_wide_for_a_terminal_is_turned(width: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on 80 columns the table of a build was cut to `90…`. What fits neither way stays as it is."""
    terminal = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr(commands, "output", terminal)
    measures = [f"measure {number}" for number in range(7)]
    table = Table("variant", *measures)
    table.add_row("fp32", *(f"{number}.25" for number in range(7)))
    table.add_row("int8", *(f"{number}.75" for number in range(7)))
    commands.screen_table(table)
    assert isinstance(terminal.file, io.StringIO)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in terminal.file.getvalue().splitlines()]
    assert (["measure 6", "6.25", "6.75"] in cells) is turned
    assert (["int8", *(f"{number}.75" for number in range(7))] in cells) is (width == 120)


def test_commands_that_read_a_repository_load_no_torch() -> None:
    program = (
        "import sys, builder.commands.check, builder.commands.serve, builder.commands.report\n"
        "import builder.repository.report.page\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such/model"], "no folder no-such/model here"),
        (["../nowhere/at/all"], "neither a folder nor a Hub id"),
        (["org/name", "--name", "a/b"], "without a path"),
        (["absent.yaml"], "absent.yaml cannot be read"),
        (["absent.yaml", "--precision", "int8"], "options belong in the file"),
        (["serve", "no-such-folder"], "holds no model; build one first"),
        (["check", "no-such-folder"], "is not a folder; build a model first"),
        (["check", "--triton", "1.0"], "Triton 1.0 is not known"),
        (["query", "m", "text", "--url", "127.0.0.1:1"], "no Triton answers at 127.0.0.1:1"),
        (["load-test", "m", "--concurrency", "many"], "'many' is not a list of numbers"),
        (["serv"], "did you mean build-repo serve?"),
        (["chek", "model_repository"], "did you mean build-repo check?"),
        (["loadtest", "m", "--concurrency", "8"], "did you mean build-repo load-test?"),
    ],
)
def test_errors_are_reported_without_a_traceback(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(arguments) == 1
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_command_alone_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "_force_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 10
    assert "build-repo doctor " in shown
    assert "nothing is built here so far" in shown
    (tmp_path / "model_repository" / "topics").mkdir(parents=True)
    (tmp_path / "model_repository" / "topics" / "build.json").write_text("{}")
    assert main([]) == 0
    assert 'build-repo query topics text_input="Hello"' in capsys.readouterr().out


def test_command_alone_in_a_program_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "MODEL" in capsys.readouterr().err


COMPLETION = """
source "$1"
COMP_WORDS=(build-repo "${@:2}"); COMP_CWORD=$(($# - 1))
_shtab_build_repo build-repo "${@: -1}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_offers_verbs_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "models.yaml").touch()
    for words, expected in {
        ("",): list(VERBS),
        ("pul",): ["pull"],
        ("org/name", "--preci"): ["--precision"],
        ("org/name", "--precision", "int8-s"): ["int8-static"],
        ("pull", "--verify"): ["--verify-key"],
        ("plan", "mod"): ["models.yaml"],
    }.items():
        command = ["bash", "-c", COMPLETION, "bash", str(tmp_path / "script"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["org/name", "--presicion", "int8"], "--precision?"),
        (["org/name", "--max-batchsize=8", "--tasks=x", "--zzz"], "--max-batch-size and --task?"),
        (["serve", "--htpp-port", "8000"], "--http-port?"),
        (["gateway", "--admin-kye", "x"], "--admin-key?"),
    ],
)
def test_misspelt_option_suggests_the_nearest(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert f"did you mean {near}" in capsys.readouterr().err


def test_folder_named_almost_like_a_verb_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serv").mkdir()
    command, options = parse(["serv", "--precision", "int8"])
    assert command.__name__ == "builder.commands.build"
    assert (options.model, options.precision) == ("serv", "int8")
    assert parse(["org/serv"])[1].model == "org/serv"


@pytest.mark.parametrize(
    ("module", "said"), [("torch", "done, thread, at the end\n"), ("other", "done, thread, at the end\ntaken down\n")]
)
def test_program_exits_without_unloading_torch(module: str, said: str) -> None:
    """Regression: unloading torch took one or two seconds of CPU time after each build."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module], stdout=subprocess.PIPE, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (3, said)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--version"], f"build-repo {version(DISTRIBUTION)}\n"),
        (["help"], "usage: build-repo [-h]"),
        (["help", "serve"], "usage: build-repo serve [-h]"),
        (["help", "load-test"], "numbers of concurrent requests"),
        (["--help"], "One of fp32,"),
    ],
)
def test_version_and_help_are_printed(arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert shown in capsys.readouterr().out


def test_help_lists_every_verb() -> None:
    """Regression: `unshare` was missing."""
    assert [verb for verb in VERBS if f"\nbuild-repo {verb} " not in str(cli.__doc__)] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--http-port", "70000"], "a port, 1 to 65535"),
        (["serve", "--openai-port", "0"], "a port, 1 to 65535"),
        (["serve", "--replicas", "x:2"], "a whole number of at least 1"),
        (["gateway", "--port", "-1"], "a port, 1 to 65535"),
        (["gateway", "--memory-gb", "nan"], "a number above 0"),
        (["load-test", "m", "--seconds", "inf"], "a number above 0"),
        (["load-test", "m", "--repeats", "0"], "a whole number of at least 1"),
        (["promote", "m", "--watch", "soon"], "a number above 0"),
        (["models.yaml", "--memory-gb", "0"], "a number above 0"),
    ],
)
def test_option_error_names_the_expected_number(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert f"{arguments[-1].split(':')[0]!r} is not {expected}" in capsys.readouterr().err


def test_query_from_arguments_and_from_standard_input(server: TritonServer) -> None:
    one = _run("query", "topics", "text_input=A fox.", "top_k=2", "--url", server.url)
    assert one.returncode == 0, one.stderr
    answer = json.loads(one.stdout)
    assert len(answer["label"]) == len(answer["score"]) == 2
    many = _run("query", "topics", "--url", server.url, input='A fox.\n{"text_input": "A box.", "top_k": 3}\n\n')
    lines = [json.loads(line) for line in many.stdout.splitlines()]
    assert [len(line["label"]) for line in lines] == [1, 3]
    assert lines[0]["label"] == answer["label"][:1]
    wrong = _run("query", "topics", "text_input= ", "--url", server.url)
    assert wrong.returncode == 1
    assert "is empty" in json.loads(wrong.stdout)["error"]
    lists = _run("query", "entail", "text_input=A fox.", 'candidate_labels=["animals", "trains"]', "--url", server.url)
    assert sorted(json.loads(lists.stdout)["label"]) == ["animals", "trains"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["A fox."], "'A fox.' is not KEY=VALUE; write the name of an input before it, such as text_input=A fox."),
        (['text_input=["A fox.'], "text_input begins like JSON and is not (Unterminated string"),
        (["--file", "absent.txt"], "absent.txt cannot be read (No such file or directory); name another with --file"),
        (["--file", "."], ". cannot be read (Is a directory)"),
        (["--file", "damaged.jsonl"], "line 2 begins like JSON and is not (Expecting value"),
    ],
)
def test_query_reports_bad_requests_in_one_line(
    arguments: list[str],
    message: str,
    server: TritonServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    Path("damaged.jsonl").write_text('A fox.\n{"text_input": }\n')
    assert main(["query", "topics", *arguments, "--url", server.url]) == 1
    assert message in capfd.readouterr().err


def test_query_reads_a_file_that_is_not_utf8(server: TritonServer, tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.write_bytes(b"fine\n\xff\xfe\nfine too\n")
    done = _run("query", "topics", "--file", str(path), "--url", server.url)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["error" in answer for answer in answers] == [False, True, False]
    assert done.returncode == 1


@pytest.mark.parametrize("name", ["masks", "entail"])
def test_load_test_drives_any_task_with_fitting_inputs(
    name: str, server: TritonServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    short = ["--seconds", "1.5", "--repeats", "1"]
    assert main(["load-test", name, "--url", server.url, "--concurrency", "3", "--json", *short]) == 0
    (load,) = json.loads(capfd.readouterr().out)["loads"]
    assert load["level"] == {"kind": "concurrency", "value": 3}, "of masks more than 3 may find no place to wait"
    assert load["client"]["requests_per_s"] > 0
    assert load["server"]["failures"] == 0
    assert 0 < load["client"]["p50_ms"] <= load["client"]["p99_ms"]
    assert load["server"]["mean_batch"] > 1
    assert sum(load["server"]["batches"].values()) > 1
    assert load["server"]["compute_ms"] > 0


def test_load_test_offers_a_rate_to_a_mix(
    server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    saved, page = tmp_path / "load.json", tmp_path / "load.html"
    command = ["load-test", "topics:3", "names", "--url", server.url, "--rate", "40", "--seconds", "1.2"]

    def offered() -> dict[str, float]:
        assert main([*command, "--repeats", "1", "--save", str(saved), "--page", str(page)]) == 0
        return {load.model: load.client.requests_per_s for load in read(saved).loads}

    expected = {"topics": pytest.approx(30, rel=0.5), "names": pytest.approx(10, rel=0.7)}
    assert any(offered() == expected for _ in range(TRIES)), "a busy machine now and then delays what is to be sent"
    assert "topics: latency against throughput" in page.read_text()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_serve_reports_ready_and_cleans_up(stop: signal.Signals, small_repository: Path) -> None:
    ports = free_ports()
    command = [BUILD_REPO, "serve", str(small_repository), "--grpc-port", str(ports.grpc)]
    command += ["--http-port", str(ports.http), "--metrics-port", str(ports.metrics)]
    command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]  # as in a background job of a shell
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "ready" in line:
                break
        children = _children(process.pid)
        assert children, "".join(lines)
        process.send_signal(stop)
        rest = process.stdout.read()
        process.wait(timeout=300)
    assert any("topics" in line and "READY" in line for line in lines), "".join(lines)
    assert any(f"127.0.0.1:{ports.grpc}" in line for line in lines)
    assert any("for development and load tests" in line for line in lines)
    if stop is not signal.SIGKILL:
        assert "stopped" in rest
        assert process.returncode == 0
    end = time.monotonic() + 300
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_serve_names_a_port_in_use(small_repository: Path) -> None:
    ports = free_ports()
    others = ["--http-port", str(ports.http), "--metrics-port", str(ports.metrics)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        served = _run("serve", str(small_repository), *others, "--grpc-port", str(port))
    assert served.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in served.stderr
    assert "--grpc-port N" in served.stderr


def test_serve_names_a_model_that_fails_to_load(small_repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "with a space" / "model_repository"
    shutil.copytree(small_repository, broken)
    (broken / "topics" / "1" / "model.onnx").write_bytes(b"no graph")
    ports = free_ports()
    numbers = [f"--{kind}-port={getattr(ports, kind)}" for kind in ("http", "grpc", "metrics")]
    served = _run("serve", str(broken), *numbers)
    assert served.returncode == 1
    assert "the model topics does not load" in served.stderr
    assert "build-repo check" in served.stderr


def _children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            children.append(int(path.parent.name))
    return [*children, *(grandchild for child in children for grandchild in _children(child))]
