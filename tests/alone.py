"""Runs code where our package was never imported: in a copy of a process with transformers.

This module must not import our package, because that process imports this module.
"""

import json
import multiprocessing
import os
import sys
import tempfile

# Modules that are slow to import.
PRELOADED = ["torch", "transformers.pipelines", "transformers.generation.utils"]


def run_alone(code, *flags, cwd):
    """The JSON that the code prints in its last line. Dynamic modules are cached in the folder
    `cwd`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile("w+") as output:
        argv = ["-c", *map(str, flags)]
        process = context.Process(target=_become, args=(code, argv, str(cwd), output.name))
        process.start()
        process.join(120)
        printed = output.read()
    assert process.exitcode == 0, printed[-4000:]
    return json.loads(printed.splitlines()[-1])


def _become(code, argv, cwd, output):
    from transformers import dynamic_module_utils

    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    sys.argv = argv
    dynamic_module_utils.HF_MODULES_CACHE = cwd
    exec(code, {"__name__": "__main__"})
