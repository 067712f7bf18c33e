"""Programs that use vLLM as a library, in a process of their own: `vllm.LLM` with its engine inside it, stepped by
nobody but `generate()`. What they leave as their result is what a test looks at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtally.processes import ending_with_us, python_path
from kvtally.testing.engines import ENVIRONMENT

DEADLINE_S = 600.0
# `llm` is the engine; `ask(tokens)` is vLLM's count of cached tokens of a prompt that gets four tokens; `settle()`
# waits until the store has everything.
PROLOGUE = """
import json, os, sys, time
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to stdout
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from kvtally.vllm.connector import workers
arguments, given = json.loads(sys.argv[1])
llm = LLM(skip_tokenizer_init=True, **arguments)
def ask(tokens):
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    return llm.generate(TokensPrompt(prompt_token_ids=tokens), sampling, use_tqdm=False)[0].num_cached_tokens
def settle():
    while any(worker._unfinished for worker in workers.values()):
        time.sleep(0.01)
"""
EPILOGUE = """
answer.write(json.dumps(result))
answer.close()
llm.llm_engine.engine_core.shutdown()
"""


def run_offline(program: str, arguments: Mapping[str, Any], given: object, log: Path) -> Any:
    """Run a program that leaves `result`. `given` is what it is to work with."""
    source = PROLOGUE + program + EPILOGUE
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": python_path()}
    command = ending_with_us([sys.executable, "-c", source, json.dumps([dict(arguments), given])])
    with log.open("ab") as errors:
        done = subprocess.run(
            command,
            env={**os.environ, **ENVIRONMENT, **settings},
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    return json.loads(done.stdout)
