"""The load of serve_load.py on transformers: load.py EXPORT DEVICE [--out FILE] [--seconds 12] …

Its continuous batching with paged attention (`ContinuousBatchingManager`, streaming, default settings) gets the same
requests at the same moments, greedy, in one process without a server. Prints and writes the same rows.
"""

import argparse
import heapq
import itertools
import json
import pathlib
import sys
import time

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))

import serve_load  # noqa: E402  (its folder is named above)


class Batching:
    """A running manager, in place of a server."""

    def __init__(self, export, device):
        """Loads an export and starts the manager, which reads a short prompt first."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=dtype).to(device).eval()
        settings = transformers.GenerationConfig(
            max_new_tokens=serve_load.LONGEST_ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
        sizes = {} if device == "cuda" else {"num_blocks": 256, "max_batch_tokens": 512}
        self.manager = model.init_continuous_batching(
            generation_config=settings, continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes))
        # As `generate_batch` begins: steps of the largest sizes are captured first.
        self.manager.warmup()
        self.manager.start()

    def play(self, requests, goes_on, again=None):
        """As `serve_load.play`."""
        order = itertools.count()
        waiting = [(asked.begun, next(order), asked) for asked in requests]
        heapq.heapify(waiting)
        open_texts, sent = {}, []
        while goes_on(sent) and (waiting or open_texts):
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                asked = heapq.heappop(waiting)[2]
                prompt = json.loads(serve_load.prompt_of(asked.prompt, serve_load.play.number))
                serve_load.play.number += 1
                name = self.manager.add_request(prompt, max_new_tokens=asked.answer, streaming=True)
                open_texts[name] = asked
                sent.append(asked)
            found = self.manager.get_result(timeout=0.005)
            if found is None or (asked := open_texts.get(found.request_id)) is None:
                if not self.manager.is_running():
                    raise SystemExit("the manager has ended")
                continue
            if found.error:
                raise SystemExit(f"a request failed: {found.error}")
            now = time.monotonic()
            asked.times += [now] * (len(found.generated_tokens) - len(asked.times))
            if found.is_finished():
                del open_texts[found.request_id]
                if again:
                    heapq.heappush(waiting, (now, next(order), again(now)))
        for name in open_texts:
            self.manager.cancel_request(name)
        return sent


def main():
    """Measures the cells."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("export")
    words.add_argument("device")
    words = serve_load.load_words(words).parse_args()
    batching = Batching(words.export, words.device)
    serve_load.Report(words).measure(lambda requests, goes_on, _, again=None: batching.play(requests, goes_on, again))
    batching.manager.stop(block=True, timeout=5)


if __name__ == "__main__":
    main()
