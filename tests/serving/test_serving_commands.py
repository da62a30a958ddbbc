"""Every command of docs/serving_shapes.md, read by the parser of the program that it starts."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.engine_job import call

ROOT = Path(__file__).parents[2]


def _commands(program: str) -> list[list[str]]:
    """The arguments that each command of the page gives to a program."""
    page = (ROOT / "docs/serving_shapes.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [c[c.index(program) + 1 :] for c in commands if program in c]


def _read(commands: list[list[str]]) -> None:
    """Read all commands. The last one is refused with a flag that vLLM does not have."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for words in commands:
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        validate_parsed_serve_args(parsed)
        assert parsed.model_tag
    with pytest.raises(SystemExit):
        make_arg_parser(FlexibleArgumentParser()).parse_args([*commands[-1], "--speed", "11"])


@pytest.mark.vllm
def test_vllm_reads_every_command_and_refuses_a_flag_that_it_does_not_have():
    commands = [words[1:] for words in _commands("vllm")]
    assert len(commands) == 9
    call(_read, commands)


ROUTER = ROOT / ".venv-router/bin/python"
_READ = """
import json, sys
from vllm_router.launch_router import parse_router_args
found = [vars(parse_router_args(words)) for words in json.loads(sys.argv[1])]
print(json.dumps(found, default=str))
"""


@pytest.mark.skipif(not ROUTER.exists(), reason="scripts/peers installs vllm-router")
def test_the_router_reads_what_was_meant():
    done = subprocess.run(
        [ROUTER, "-c", _READ, json.dumps(_commands("vllm-router"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    replicas, wide, split = json.loads(done.stdout.splitlines()[-1])
    assert replicas["worker_urls"] == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    assert (replicas["policy"], replicas["port"]) == ("cache_aware", 30000)
    assert wide["worker_urls"] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert split["vllm_pd_disaggregation"]
    assert split["prefill_urls"] == [["http://10.0.0.1:8000", None]]
    assert split["decode_urls"] == ["http://10.0.0.2:8000"]
