"""Tokenised text beside other programs': the shards that `sieve data prepare` writes, read by Megatron Core and compared
token by token with Hugging Face's tokenizers; and the time of both.

    python -m venv env && env/bin/pip install torch numpy tokenizers && env/bin/pip install --no-deps megatron-core
    env/bin/python tests/python/shards_elsewhere.py --sieve target/release/sieve --text data/crates.jsonl [--vocabulary 16384]

TEXT is JSON lines with "text". Every document of the training and of the validation shard is compared, and no other may
be there; each ends with the end-of-text token. Times: `sieve data prepare`, from the file to finished shards, its
tokenizer there; `encode_batch` of tokenizers on texts that are in memory already, all cores. Exits with 1 where a
document differs.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=64, help="documents of one encode_batch")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # Megatron Core names GPU packages that reading a file does not need
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    text = str(arguments.text.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        sieve = lambda *words: subprocess.run([arguments.sieve, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
        tokenizer, recipe, shards = folder / "tokenizer.json", folder / "recipe.toml", folder / "shards"
        sieve("tokenizer", "train", "--data", text, "--vocab-size", arguments.vocabulary, "--out", tokenizer)
        sieve("recipe", "new", "--size", "80m", "--data", text, "--tokenizer", tokenizer, "--out", recipe)
        began = time.monotonic()
        sieve("data", "prepare", "--recipe", recipe, "--data-dir", shards)
        prepare_seconds = time.monotonic() - began
        documents = collections.Counter()
        for name in ("train", "validation"):
            shard = IndexedDataset(str(shards / name))
            documents.update(shard[number].astype(numpy.int32).tobytes() for number in range(len(shard)))
        end = json.loads((shards / "meta.json").read_text())["eos_id"]
        num_tokens = sum(len(document) // 4 * count for document, count in documents.items())

        texts = [json.loads(line)["text"] for line in arguments.text.open(encoding="utf-8")]
        encoder, encode_seconds = Tokenizer.from_file(str(tokenizer)), 0.0
        # tokenizers reads the name of a special token in a text as the token; sieve keeps it text.
        names = [token.content for token in encoder.get_added_tokens_decoder().values()]
        special = [any(name in text for name in names) for text in texts]
        for at in range(0, len(texts), arguments.batch):
            began = time.monotonic()
            encodings = encoder.encode_batch_fast(texts[at:at + arguments.batch], add_special_tokens=False)
            encode_seconds += time.monotonic() - began
            batch = zip(encodings, special[at:at + arguments.batch])
            documents.subtract(numpy.array([*encoding.ids, end], numpy.int32).tobytes() for encoding, named in batch if not named)
    words = lambda document: encoder.decode(numpy.frombuffer(document, numpy.int32).tolist()[:-1], skip_special_tokens=False)
    left = [words(document) for document, count in documents.items() for _ in range(count)]
    missing = [words(document) for document, count in documents.items() for _ in range(-count)]
    # Where the hash holds nothing out, the end of a document is held out: its two parts make the document.
    is_cut = lambda text: any(first + second == text for first in left for second in left)
    cut = [text for text in missing if is_cut(text)]
    named_cut = [text for text, named in zip(texts, special) if named and text not in left and is_cut(text)]
    differ = len(missing) - len(cut) + abs(len(left) - sum(special) - 2 * len(cut) - len(named_cut))
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {size:.1f} MB of text, {num_tokens:,} tokens; {differ} documents differ; {len(cut) + len(named_cut)} cut between the "
          f"shards, {sum(special)} not compared, since they hold the name of a special token")
    print(f"sieve data prepare  {prepare_seconds:6.1f} s  {size / prepare_seconds:5.1f} MB/s")
    print(f"tokenizers          {encode_seconds:6.1f} s  {size / encode_seconds:5.1f} MB/s")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
