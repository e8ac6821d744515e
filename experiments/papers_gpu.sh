#!/usr/bin/env bash
# What docs/papers.md still lacks and one GPU can measure: whole selectors, selection included, beside dense attention.
#
#   experiments/papers_gpu.sh SIEVE OUT    a JSON file a part in OUT; 200 s on one H200, by prediction
#
# A part: predicted seconds, what it decides.
#   trim     15   MOMO, Table 1: trimming makes a union that is slower than dense attention faster than it, 131,072 tokens
#   topk     75   MOMO, Figure 4: time of the three ways to keep the best k blocks, and the mass they keep
#   far      50   BA-Att and PBS at 262,144 tokens: 6.95 and 5.70, 2.75 times dense attention
#   million  45   MOMO, Figure 6: 524,288 and 1,048,576 tokens
#   permute  15   PBS-Attn, Appendix C: what permuting costs, 131,072 tokens
# PARTS names some of them. A part that fails leaves its words in OUT/PART.txt, and the others go on.
set -uo pipefail
sieve="$1" out="$2"
mkdir -p "$out"
part() {
  local name="$1" lengths="$2" selector flags=() began=$SECONDS
  shift 2
  case " ${PARTS:-trim topk far million permute} " in *" $name "*) ;; *) return ;; esac
  for selector in "$@"; do flags+=(--selector "$selector"); done
  timeout 200 "$sieve" kernels bench --selectors --lengths "$lengths" --repetitions 5 --json "$out/$name.json" \
    "${flags[@]}" > "$out/$name.txt" 2>&1
  echo "$name: exit $?, $((SECONDS - began)) s"
}
all=first_dense_layers=0
topk=()
for k in 8 16 32 64 128 256 512; do
  topk+=("momo:$all,topk=hybrid,k=$k")
  # The GPU's exact lists and its trees hold 128 blocks.
  [ "$k" -gt 128 ] || topk+=("momo:$all,topk=exact,k=$k" "momo:$all,topk=tree,k=$k")
done
# k_trim is k (128) when absent; 1024 holds every block of eight rows' union.
part trim 131072 "momo:$all" "momo:$all,k_trim=256" "momo:$all,k_trim=1024"
part topk 131072 "${topk[@]}"
part far 262144 bfla pbs pbs:permute=none xattention "flexprefill:gamma=0.9" "momo:$all" "ba_att:$all" \
  "ba_att:$all,sparsity=0.9" "ba_att:$all,compensate_layers=none" "ba_att:$all,sparsity=0.9,compensate_layers=none" \
  "ba_att:$all,sparsity=0.9,sort=none,compensate_layers=none"
part million 524288,1048576 "momo:$all" bfla block_sparse
part permute 131072 pbs pbs:permute=none pbs:segment=128 pbs:select=xattention pbs:select=xattention,permute=none
