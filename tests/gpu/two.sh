#!/usr/bin/env bash
# Two or four GPUs of one host under every launcher, and what happens to them: an 80M model whose sums have a fixed
# order. One line a part; losses are compared with `sieve launch --nproc GPUS`, which runs first.
#
#   tests/gpu/two.sh SIEVE TEXT.jsonl OUT [hosts|groups|torchrun|kill|slow]…
#
# hosts     two launchers as two hosts of half the GPUs each: NCCL over sockets between them
# groups    the same with ZeRO-3 inside each host and copies on the other (parallelism.shard_ranks), four GPUs
# torchrun  one torchrun of all processes, and two torchruns as two hosts; TORCHRUN (torchrun) is the program
# kill      kill -9 of a rank in a step, continued on RESUMED GPUs (1; of four 2 and 4); under STAGES of ZeRO (1 2; of
#           four 3)
# slow      another training run on the second GPU: does the health test name rank 1?
#
# GPUS (2), KIND (dma), STEPS (60), LIMIT of seconds a run (60). DEVICE=cpu with SETS="section.key=value …", a small
# shape, tries the script. About 170 s on two H200s. By those, GPUS=4 … hosts groups kill: 90 s on four.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(hosts torchrun kill slow)
gpus="${GPUS:-2}" half=$((${GPUS:-2} / 2))
[ "$gpus" = 2 ] && stages="${STAGES:-1 2}" resumed="${RESUMED:-1}" || stages="${STAGES:-3}" resumed="${RESUMED:-2 4}"
device="${DEVICE:-cuda}" steps="${STEPS:-60}" torchrun="${TORCHRUN:-torchrun}" failed=0 port=29640
export SIEVE_TOKEN="two-$$"
mkdir -p "$out"
# Processes of every launcher: torchrun gives each a session of its own.
trap 'pgrep -f -- "--out $out/" | xargs -r kill -KILL' EXIT
trap 'exit 143' INT TERM
sets=()
for set in metrics.log_freq=1 validation.tokens=8192 training.local_batch_size=8 \
  training.global_batch_size=32 data.cache_dir="$out/cache" tokenizer.train.vocab_size=2048 ${SETS:-}; do
  sets+=(--set "$set")
done
recipe=(--recipe "$out/two.toml" "${sets[@]}")
rm -f "$out/two.toml"
"$sieve" recipe new --size 80m --kind "${KIND:-dma}" --data "$text" --out "$out/two.toml" > "$out/text.txt" 2>&1 &&
  "$sieve" data prepare "${recipe[@]}" >> "$out/text.txt" 2>&1 || { echo "FAILED: $(tail -1 "$out/text.txt")"; exit 1; }

fail() { echo "$1: FAILED: $2"; failed=1; }
limited() { timeout -k 5 "${LIMIT:-60}" "$@"; }
# Arguments of a run with this name.
train() { words=(train "${recipe[@]}" --device "${2:-$device}" --out "$out/$1" "${@:3}"); rm -rf "${out:?}/$1"; }

# finished NAME CODE PID…: waits for a run's processes.
finished() {
  local pid code=0
  for pid in "${@:3}"; do wait "$pid" || code=$?; done
  [ "$code" = "$2" ] || { fail "$1" "exit code $code, not $2, see $out/$1.txt: $(tail -1 "$out/$1.txt")"; return 1; }
}

# near NAME TOLERANCE WORDS: compares each step's loss with the first run's.
near() {
  python3 - "$out/launch" "$out/$1" "$2" "$3" << 'PYTHON' || failed=1
import json, sys
def losses(run):
    lines = map(json.loads, open(run + "/metrics.jsonl", encoding="utf-8"))
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
first, other = losses(sys.argv[1]), losses(sys.argv[2])
both, tolerance = sorted(first.keys() & other.keys()), float(sys.argv[3])
apart = max((abs(first[step] - other[step]) for step in both), default=float("nan"))
ok = len(both) >= 5 and apart <= tolerance
print(f"{sys.argv[2].split('/')[-1]}: {'ok' if ok else 'FAILED'}: {len(both)} steps to step {max(both, default=0)}, "
      f"losses at most {apart:.3g} apart; {sys.argv[4]}", flush=True)
sys.exit(not ok)
PYTHON
}

# as_hosts NAME COMMAND…: the same command as host 1 and as host 0, each with half the GPUs; NODE_RANK in it is the host.
as_hosts() {
  local name="$1" rank pids=() apart
  shift
  # Of two GPUs each is alone on its host. Of four, those of a host reach each other.
  [ "$gpus" = 2 ] && apart=(NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1) || apart=(NCCL_HOSTID=host-NODE_RANK)
  port=$((port + 1))
  rm -f "$out/$name".{txt,nccl.*}
  for rank in 1 0; do
    env CUDA_VISIBLE_DEVICES="$(seq -s, $((rank * half)) $((rank * half + half - 1)))" "${apart[@]//NODE_RANK/$rank}" \
      NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$out/$name.nccl.$rank.%p" \
      timeout -k 5 "${LIMIT:-60}" "${@//NODE_RANK/$rank}" >> "$out/$name.txt" 2>&1 &
    pids+=($!)
  done
  finished "$name" 0 "${pids[@]}" || return
  local ways
  ways="$(grep -ho 'via [A-Z0-9a-z/]*' "$out/$name".nccl.* 2> /dev/null | sort | uniq -c | xargs)"
  [ "$device" = cpu ] || [[ "$ways" = *NET/Socket* ]] || fail "$name" "no NET/Socket in $out/$name.nccl.*"
  near "$name" "$tolerance" "$ways"
}

# Waits for a run's STEP, or the end of its PID.
reaches() {
  until [ "$(grep -c '"kind":"step"' "$out/$1/metrics.jsonl" 2> /dev/null)" -ge "$2" ] 2> /dev/null; do
    kill -0 "$3" 2> /dev/null || return
    sleep 0.05
  done
}

train launch "$device" --stop-after "$steps"
limited "$sieve" launch --nproc "$gpus" -- "${words[@]}" > "$out/launch.txt" 2>&1 &
finished launch 0 $! || exit 1
tolerance="${TOLERANCE:-0}"
near launch 0 "$(grep -h '^health' "$out/launch/log")"

for part in "${parts[@]}"; do
  case "$part" in
    hosts)
      train hosts "$device" --stop-after "$steps"
      as_hosts hosts "$sieve" launch --nproc "$half" --nnodes 2 --node-rank NODE_RANK \
        --master "127.0.0.1:$((port + 1))" -- "${words[@]}"
      ;;
    groups)
      train groups "$device" --stop-after "$steps" --set parallelism.zero_stage=3 --set parallelism.shard_ranks="$half"
      # Sums have another order.
      tolerance="${TOLERANCE:-0.02}" as_hosts groups "$sieve" launch --nproc "$half" --nnodes 2 --node-rank NODE_RANK \
        --master "127.0.0.1:$((port + 1))" -- "${words[@]}"
      ;;
    torchrun)
      train torchrun "$device" --stop-after "$steps"
      limited "$torchrun" --nproc-per-node "$gpus" --no-python "$sieve" "${words[@]}" > "$out/torchrun.txt" 2>&1 &
      finished torchrun 0 $! && near torchrun "$tolerance" "one torchrun"
      train torchruns "$device" --stop-after "$steps"
      as_hosts torchruns "$torchrun" --nnodes 2 --nproc-per-node "$half" --node-rank NODE_RANK --master-addr 127.0.0.1 \
        --master-port "$((port + 1))" --no-python "$sieve" "${words[@]}"
      ;;
    kill)
      for stage in $stages; do
        name="kill-zero-$stage"
        train "$name" "$device" --set parallelism.zero_stage="$stage" --set checkpoint.interval=5
        limited "$sieve" launch --nproc "$gpus" -- "${words[@]}" > "$out/$name.txt" 2>&1 &
        job=$!
        until ls "$out/$name/checkpoint" 2> /dev/null | grep -q 'step-[0-9]*$' || ! kill -0 "$job" 2> /dev/null; do
          sleep 0.05
        done
        reaches "$name" 8 "$job"
        kill -KILL "$(pgrep -f "^$sieve train .*--out $out/$name " | tail -1)"
        since="$(date +%s%N)"
        finished "$name" 75 "$job" || continue
        took=$(($(date +%s%N) - since)) line="$(grep -m1 '^error' "$out/$name.txt")"
        for count in $resumed; do
          again="$name-$count" place="$device" launched=()
          rm -rf "${out:?}/$again"
          cp -r "$out/$name" "$out/$again"
          [ "$count" -gt 1 ] && launched=(launch --nproc "$count" --)
          [ "$count$device" != 1cuda ] || place=cuda:0
          limited "$sieve" "${launched[@]}" train "${recipe[@]}" --device "$place" --out "$out/$again" \
            --set parallelism.zero_stage="$stage" --resume --stop-after 10 > "$out/$again.txt" 2>&1 &
          finished "$again" 0 $! || continue
          near "$again" 0.02 \
            "$((took / 1000000)) ms from kill -9 to exit code 75 ($line); $(grep -h 'continuing at' "$out/$again/log")"
        done
      done
      ;;
    slow)
      [ "$device" = cpu ] && second=cpu || second=cuda:1
      train load "$second"
      limited "$sieve" "${words[@]}" > "$out/load.txt" 2>&1 &
      load=$!
      reaches load 3 "$load"
      train slow "$device" --stop-after 5
      limited "$sieve" launch --nproc "$gpus" -- "${words[@]}" > "$out/slow.txt" 2>&1 &
      finished slow 0 $!
      kill -0 "$load" 2> /dev/null || fail slow "the load ended, see $out/load.txt"
      pgrep -f -- "--out $out/load" | xargs -r kill -KILL
      wait "$load" 2> /dev/null
      echo "slow: $(grep -hE '^health' "$out/slow/log"); $(grep -h 'is slow' "$out/slow/log" || echo 'nobody named')"
      ;;
    *)
      echo "there is no part '$part': hosts, groups, torchrun, kill or slow"
      exit 2
      ;;
  esac
done
exit "$failed"
