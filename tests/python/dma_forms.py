"""The forms of DMA that the arguments of sieve_attention say: each line of the standard input is a JSON object of
arguments, each line of the standard output the form, or the refusal.

    dma_forms.py FOLDER     FOLDER is python/sieve_attention; needs no torch
"""

import importlib.util
import json
import pathlib
import sys
import types


def module(folder):
    """`_dma.py` without the package around it, which imports torch."""
    package, library = types.ModuleType("sieve_attention"), types.ModuleType("sieve_attention._library")
    package.__path__, library.SieveError = [str(folder)], type("SieveError", (ValueError,), {})
    sys.modules.update({"sieve_attention": package, "sieve_attention._library": library})
    spec = importlib.util.spec_from_file_location("sieve_attention._dma", folder / "_dma.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def main():
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    dma = module(pathlib.Path(sys.argv[1]))
    for line in sys.stdin:
        given = json.loads(line)
        try:
            print(json.dumps(dma.form("dma_attention", given.pop("keep"), given.pop("kv_heads"), **given)._asdict()))
        except ValueError as error:
            print(json.dumps({"refused": str(error)}))


if __name__ == "__main__":
    main()
