"""`hccl-fusion run`: real processes, and none of them left behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys

import pytest
from scripts.rank_runner import SCRIPTS, environment, finish, poll, runs, started

from hccl_fusion.errors import UsageError
from hccl_fusion.runtime.group_registry import LifecycleError
from hccl_fusion.runtime.launcher import Host, Job, free_ports, is_this_host, launch, parse_hosts
from hccl_fusion.runtime.processes import LinePrefixer, exit_text

RUN = ["-m", "hccl_fusion", "run"]
REPORT = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
with open(os.path.join(sys.argv[1], os.environ["HCCL_FUSION_RANK"] + ".new"), "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.replace(file.name, file.name[:-4])
"""
WAIT = "import time\ntime.sleep(600)\n"


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def reports(tmp_path):
    """Where the ranks of a test say which processes they are; at its end none of them is left."""
    folder = tmp_path / "reports"
    folder.mkdir()
    yield folder
    left = [pid for path in folder.iterdir() for pid in map(int, path.read_text().split()) if runs(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def pids(reports, count):
    """The processes of `count` ranks, when all have reported: (rank's, its child's) by rank."""

    def complete():
        found = {int(path.name): path.read_text() for path in reports.iterdir() if path.name.isdigit()}
        return found if len(found) == count else None

    found = poll(complete, f"reports of {count} ranks")
    return [tuple(map(int, found[rank].split())) for rank in range(count)]


def run(*arguments, **variables):
    with started([*RUN, *arguments], **variables) as process:
        return finish(process, 90)


class TestRealRanks:
    def test_four_ranks_a_subgroup_and_all_ways_to_reduce(self):
        result = run("-n", "4", "--timeout", "60", SCRIPTS / "sum_of_ranks.py", "groups")
        assert result.code == 0, result.err
        lines = result.out.splitlines()
        for rank in range(4):
            own = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
            assert own[0] == f"rank {rank} of 4, local {rank} of 4"
            group = [f"group {2 - rank} 5.0"] if rank in (1, 2) else []
            sums = ["session 10.0 10.0", *group, "eager 10.0", "function 10.0", "large 10.0", "session again 10.0 10.0"]
            assert own[1:-1] == sums
        assert len(lines) == 4 * 7 + 2


class TestOutput:
    def test_each_line_has_its_rank(self, script):
        text = (
            "import os, sys\nprint('out', *sys.argv[1:])\nprint('err', file=sys.stderr)\nsys.stdout.write('no end')\n"
        )
        result = run("-n", "2", script(text), "--json", "-n", "7", "a b")
        assert result.code == 0
        assert sorted(result.out.splitlines()) == [
            "[0] no end", "[0] out --json -n 7 a b", "[1] no end", "[1] out --json -n 7 a b",
        ]  # fmt: skip
        assert sorted(result.err.splitlines()) == ["[0] err", "[1] err"]

    def test_long_and_binary_lines_stay_whole(self, script):
        text = """
import os
line = os.environ["HCCL_FUSION_RANK"].encode() * 300_000 + bytes(range(11, 256)) + b"\\r\\n"
for _ in range(3):
    view = memoryview(line)
    while view:
        view = view[os.write(1, view[:50_000]):]
"""
        with started([*RUN, "-n", "2", script(text)]) as process:
            out, _ = process.communicate(timeout=60)
        lines = [b"[%d] " % rank + b"%d" % rank * 300_000 + bytes(range(11, 256)) + b"\r" for rank in (0, 1)]
        assert sorted(out.split(b"\n")) == sorted([b"", *lines * 3])

    def test_a_module(self, script):
        path = script("import sys\nprint(__name__, sys.argv[1:])\n", "some_module.py")
        result = run(
            "-n", "1", "-m", "some_module", "-x", PYTHONPATH=f"{path.parent}{os.pathsep}{environment()['PYTHONPATH']}"
        )
        assert (result.code, result.out) == (0, "[0] __main__ ['-x']\n")

    def test_lines_in_pieces(self):
        lines = LinePrefixer(b"> ")
        assert [lines.feed(data) for data in (b"a", b"b\nc\n\n", b"", b"d")] == [b"", b"> ab\n> c\n> \n", b"", b""]
        assert (lines.finish(), lines.finish()) == (b"> d\n", b"")

    def test_the_reader_goes_away(self, script, reports):
        path = script(REPORT + "while True: print('x' * 1000)\n")
        with started([*RUN, "-n", "2", path, reports]) as process:
            pids(reports, 2)
            assert process.stdout.read(10).startswith(b"[")
            process.stdout.close()
            assert process.wait(30) == 128 + signal.SIGPIPE
            assert process.stderr.read() == b"hccl-fusion run: nobody reads the output any more; all ranks are ended\n"


class TestFailures:
    def test_the_others_are_stopped(self, script, reports):
        fail = "import os\nif os.environ['HCCL_FUSION_RANK'] == '1':\n"
        fail += "    while len([n for n in os.listdir(sys.argv[1]) if n.isdigit()]) < 3: pass\n    sys.exit(7)\n"
        result = run("-n", "3", script(REPORT + fail + WAIT), reports)
        assert result.code == 7
        assert "hccl-fusion run: error: rank 1 ended with exit code 7; the other ranks are stopped\n" in result.err
        assert len(pids(reports, 3)) == 3

    def test_a_rank_that_a_signal_kills(self, script, reports):
        with started([*RUN, "-n", "2", script(REPORT + WAIT), reports]) as process:
            os.kill(pids(reports, 2)[0][0], signal.SIGKILL)
            result = finish(process)
        assert result.code == 137
        message = "error: rank 0 was killed by signal 9 (SIGKILL); the other ranks are stopped\n"
        assert result.err == f"hccl-fusion run: {message}"

    def test_a_rank_that_does_not_want_to_stop(self, script, reports):
        ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        with started([*RUN, "-n", "2", "--grace", "0.3", script(ignore + REPORT + WAIT), reports]) as process:
            os.kill(pids(reports, 2)[1][0], signal.SIGSEGV)
            result = finish(process)
        assert result.code == 128 + signal.SIGSEGV
        assert "rank 0 did not end within 0.3 s and is killed\n" in result.err

    def test_what_a_rank_leaves_behind_is_ended(self, script, reports):
        assert run("-n", "2", script(REPORT), reports).code == 0
        assert len(pids(reports, 2)) == 2  # and the fixture checks

    def test_the_launcher_is_killed(self, script, reports):
        with started([*RUN, "-n", "2", script(REPORT + WAIT), reports]) as process:
            ranks = pids(reports, 2)
            process.kill()
            process.wait(30)
            poll(lambda: not any(runs(rank) for rank, _ in ranks), "the ranks end with their launcher")
            for _, child in ranks:  # nobody is left to end these
                os.kill(child, signal.SIGKILL)
            poll(lambda: not any(runs(child) for _, child in ranks), "the children end")

    def test_exit_texts(self):
        assert exit_text(3) == "ended with exit code 3"
        assert exit_text(-15) == "was killed by signal 15 (SIGTERM)"
        assert exit_text(-63) == "was killed by signal 63 (unknown)"

    def test_a_rank_that_cannot_be_started(self, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(LifecycleError, match="rank 0 cannot be started, /no/such/python, found No such file"):
            launch(Job(("x.py",), ("a:1",), (0,)), io.BytesIO(), io.BytesIO())


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_they_are_passed_on(self, script, reports, number):
        with started([*RUN, "-n", "2", script(REPORT + WAIT), reports]) as process:
            pids(reports, 2)
            process.send_signal(number)
            result = finish(process)
        assert result.code == 128 + number
        assert "hccl-fusion run" not in result.err

    def test_ranks_may_end_in_peace(self, script, reports):
        handle = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        with started([*RUN, "-n", "2", script(handle + "import sys\n" + REPORT + WAIT), reports]) as process:
            pids(reports, 2)
            process.send_signal(signal.SIGTERM)
            result = finish(process)
        assert result.code == 0
        assert sorted(result.out.splitlines()) == ["[0] saved", "[1] saved"]

    def test_a_second_one_kills(self, script, reports):
        ignore = "import signal\nsignal.signal(signal.SIGINT, lambda *_: print('not yet'))\n"
        with started([*RUN, "-n", "1", "--grace", "600", script(ignore + REPORT + WAIT), reports]) as process:
            pids(reports, 1)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"[0] not yet\n"
            process.send_signal(signal.SIGINT)
            assert finish(process).code == 137

    def test_others_are_passed_on_and_end_nothing(self, script, reports):
        handle = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: (print('got it'), sys.exit(0)))\nimport sys\n"
        with started([*RUN, "-n", "1", script(handle + REPORT + WAIT), reports]) as process:
            pids(reports, 1)
            process.send_signal(signal.SIGUSR1)
            result = finish(process)
        assert (result.code, result.out) == (0, "[0] got it\n")


class TestHosts:
    def test_two_launchers_make_one_world(self, script):
        show = script("import os\nprint(os.environ['HCCL_FUSION_ADDRESSES'], os.environ['HCCL_FUSION_TIMEOUT'])\n")
        hosts = ["--hosts", "127.0.0.1:1,localhost:2", "--timeout", "9"]
        with free_ports([0]) as (port,):
            pass
        first = run(*hosts, "--here", "127.0.0.1", "--port", port, show, "a b")
        assert first.code == 0
        addresses = f"127.0.0.1:{port},localhost:{port + 1},localhost:{port + 2}"
        assert first.out == f"[0] {addresses} 9\n"
        command = first.err.partition("start on localhost: hccl-fusion run ")[2]
        assert command == (
            f"--hosts 127.0.0.1:1,localhost:2 --here localhost --port {port} --grace 10 --timeout 9 {show} 'a b'\n"
        )
        second = run(*hosts, "--here", "localhost", "--port", port, show)
        assert sorted(second.out.splitlines()) == [f"[1] {addresses} 9", f"[2] {addresses} 9"]

    def test_names(self):
        assert parse_hosts("a:2, b,[::1]:3,[::2]") == (Host("a", 2), Host("b", 1), Host("[::1]", 3), Host("[::2]", 1))
        assert is_this_host("localhost")
        assert is_this_host("127.0.0.1")
        assert not is_this_host("192.0.2.1")  # an address that is nobody's
        assert is_this_host(socket.gethostname())

    @pytest.mark.parametrize("text", ["", "a:", ":2", "a:0", "a:x", "a:2,,b:2", "a b:2", "a:b:2", "a/b"])
    def test_no_lists_of_hosts(self, text):
        with pytest.raises(UsageError, match="list of hosts is illegal, option --hosts"):
            parse_hosts(text)

    def test_a_host_twice(self):
        with pytest.raises(UsageError, match="named twice"):
            parse_hosts("a:1,b:2,a:1")


class TestUsage:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "the number of ranks is missing, hccl-fusion run, expected -n N or --hosts HOST:N,…"),
            (["-n", "0"], "invalid value for '-n'"),
            (["-n", "3", "--hosts", "a:2"], "contradict each other, found 3 and 2 ranks"),
            (
                ["--hosts", "192.0.2.1:2"],
                "no host of the list is this one, option --hosts, found 192.0.2.1; try --here",
            ),
            (["--hosts", "a:2", "--here", "b"], "this host is not in the list, option --here, found b, expected a"),
            (["-n", "2", "--here", "b"], "--here needs --hosts"),
            (["-n", "2", "--port", "5"], "--port needs --hosts"),
            (["--hosts", "localhost:9", "--port", "65530"], "the ports of all ranks do not fit"),
            (["-n", "2", "--timeout", "0"], "invalid value for '--timeout'"),
            (["-n", "2", "--nonsense"], "no such option"),
        ],
    )
    def test_errors(self, capfd, script, options, message):
        from hccl_fusion.cli import main

        assert main(["run", *options, str(script(""))]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1

    def test_no_script(self, capfd):
        from hccl_fusion.cli import main

        assert main(["run", "-n", "2", "none.py"]) == 2
        assert capfd.readouterr().err.startswith("error: the script does not exist, none.py")

    def test_a_port_that_is_taken(self, capfd, script):
        from hccl_fusion.cli import main

        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            assert main(["run", "--hosts", "localhost:1", "--port", str(port), str(script(""))]) == 2
        assert f"a port cannot be used, port {port}, found Address already in use" in capfd.readouterr().err

    def test_ports_are_free_afterwards(self):
        with free_ports([0, 0]) as ports:
            assert len(set(ports)) == 2
        for port in ports:
            with socket.socket() as again:
                again.bind(("", port))
                again.listen()
