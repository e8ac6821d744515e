#!/usr/bin/env bash
# What lab/docs/papers.md still lacks and one GPU can measure: whole selectors, selection included, beside dense attention.
#
#   lab/experiments/papers_gpu.sh SIEVE OUT     at most LIMIT (240) seconds on one GPU; a second call for what is left
#   DEVICE=cpu lab/experiments/papers_gpu.sh SIEVE OUT    the same selectors on checkpoints/tiny: a trial of a minute
#   python3 lab/experiments/papers_rows.py OUT            then: the rows behind lab/docs/papers.md
#
# A part: seconds on an H100 (of the last part by prediction), what it decides. Half of them is the check of the kernels.
# The parts run in this order, and what is not reached in time is said.
#   trim     68   MOMO, Table 1: trimming makes a union slower than dense attention faster than it, 131,072 tokens
#   topk     54   MOMO, Figure 4: time of the three ways to keep the best 128 blocks, and the mass that they keep
#   permute  66   PBS-Attn, Appendix C: what permuting costs, 131,072 tokens
#   far      42   BA-Att and PBS at 262,144 tokens: 6.95 and 5.70, 2.75 times dense attention
#   million  41   MOMO, Figure 6: 1,048,576 tokens, and 524,288 where the card has 78 GiB free
#   more     60   Figure 4 with other numbers of blocks
# PARTS names some of them. OUT/PART.txt has each row as soon as it is measured, OUT/PART.json all rows of a part at its
# end. A part whose JSON is there is not run again, so a second call does what is missing.
set -uo pipefail
[ $# -eq 2 ] || { echo "usage: $0 SIEVE OUT"; exit 1; }
sieve="$(realpath "$(command -v "$1" || echo "$1")")" out="$2" limit="${LIMIT:-240}" failed=0
mkdir -p "$out" && out="$(realpath "$out")"
cd "$(dirname "$0")/../.."
"$sieve" --version > "$out/program.txt" || exit 1
date -u +%F >> "$out/program.txt"
# NAME LENGTHS SELECTOR…
part() {
  local name="$1" lengths="$2" selector flags=() began=$SECONDS code
  shift 2
  case " ${PARTS:-trim topk permute far million more} " in *" $name "*) ;; *) return ;; esac
  [ ! -s "$out/$name.json" ] || { echo "$name: was done"; return; }
  [ $((limit - SECONDS)) -ge 5 ] || { echo "$name: not run, $limit s are over"; failed=1; return; }
  for selector in "$@"; do flags+=(--selector "$selector"); done
  local measure=(kernels bench --selectors --lengths "$lengths" --repetitions 5 --json "$out/$name.json")
  # Without a GPU nothing is measured: every selector is read and runs.
  [ "${DEVICE:-cuda}" != cpu ] || measure=(eval selectors --checkpoint checkpoints/tiny --data docs/evaluation.md
    --lengths 1024 --windows 1 --device cpu)
  timeout $((limit - SECONDS)) "$sieve" "${measure[@]}" "${flags[@]}" > "$out/$name.txt" 2>&1
  code=$?
  [ "$code" -eq 0 ] || failed=1
  echo "$name: exit $code, $((SECONDS - began)) s"
}
all=first_dense_layers=0
# Rows of more than 131,072 tokens are timed once: shorter ones before them have the kernels compiled.
warm=32768
# k_trim is k (128) when absent; 1024 holds every block of eight rows' union.
part trim 131072 "momo:$all" "momo:$all,k_trim=256" "momo:$all,k_trim=1024"
part topk 131072 "momo:$all" "momo:$all,topk=tree" "momo:$all,topk=exact"
part permute 131072 pbs pbs:permute=none pbs:segment=128 pbs:select=xattention pbs:select=xattention,permute=none
part far "$warm,262144" "ba_att:$all,sparsity=0.9,compensate_layers=none" "ba_att:$all,sparsity=0.9" pbs \
  pbs:permute=none "ba_att:$all" "ba_att:$all,compensate_layers=none" \
  "ba_att:$all,sparsity=0.9,sort=none,compensate_layers=none" bfla xattention "flexprefill:gamma=0.9"
part million "$warm,524288,1048576" "momo:$all" bfla block_sparse
more=()
# The GPU's exact lists and its trees hold 128 blocks.
for k in 64 32 16 8; do more+=("momo:$all,k=$k" "momo:$all,topk=tree,k=$k" "momo:$all,topk=exact,k=$k"); done
part more 131072 "${more[@]}" "momo:$all,k=256" "momo:$all,k=512"
exit "$failed"
