//! Recipes without a file: a kind of attention at a size of Table 4 of arXiv:2508.02124v1 that differs in a few lines
//! from the dense recipe of this size, `mha_SIZE.toml`. [`SIZES`] and [`edits`] are the only place of these lines.
use std::collections::BTreeMap;

/// What these kinds need of a size that the lines of the dense recipe do not say.
struct Size {
    name: &'static str,
    /// Query heads of the model; MLA has as many KV heads.
    num_heads: usize,
    /// MLA's latent, with its mark.
    kv_lora_rank: &'static str,
    /// Parameters besides the embedding, and parameters of MSA's indexer, for comments.
    parameters: [&'static str; 2],
    /// Columns of the feed-forward layers beside MSA's indexer.
    msa_intermediate_size: usize,
    /// Steps in which MSA's indexer warms up, and those after it with rows of 2048 tokens.
    msa_steps: [usize; 2],
}

#[rustfmt::skip]
const SIZES: [Size; 4] = [
    Size {
        name: "80m", num_heads: 6, kv_lora_rank: "192 # [paper] d_c", parameters: ["85M", "4.7M"],
        msa_intermediate_size: 2144, msa_steps: [700, 12_800],
    },
    Size {
        name: "200m", num_heads: 8, kv_lora_rank: "256 # [paper] d_c", parameters: ["201M", "10.5M"],
        msa_intermediate_size: 2848, msa_steps: [1000, 19_800],
    },
    Size {
        name: "680m", num_heads: 12, kv_lora_rank: "384 # [reading] hidden_size / 4, as at 80M and 200M",
        parameters: ["680M", "33.0M"], msa_intermediate_size: 4320, msa_steps: [1800, 33_200],
    },
    Size {
        name: "1p7b", num_heads: 16, kv_lora_rank: "512 # [reading] hidden_size / 4, as at 80M and 200M",
        parameters: ["1.41B", "66.1M"], msa_intermediate_size: 5760, msa_steps: [1600, 30_400],
    },
];

/// The kinds, with their names in a recipe's first line.
const KINDS: [(&str, &str); 5] = [
    ("mla", "multi-head latent attention (MLA), after Table 4 of arXiv:2508.02124v1"),
    ("moba", "MoBA (arXiv:2502.13189); all other sizes after Table 4 of"),
    ("infllm_v2", "InfLLM-V2 (arXiv:2509.24663); all other sizes after Table 4 of"),
    ("msa", "MSA (arXiv:2606.13392); all other sizes after Table 4 of"),
    ("cowa", "CoWindow attention (arXiv:2609.32704); all other sizes after Table 4 of"),
];

/// The recipes without a file, by name without `.toml`: their texts, as [`sibling`] makes them. `dense` gives the text
/// of `mha_SIZE` by this name.
pub fn siblings(dense: impl Fn(&str) -> String) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for size in &SIZES {
        let dense = dense(&format!("mha_{}", size.name));
        for (kind, about) in KINDS {
            all.insert(format!("{kind}_{}", size.name), with_edits(&dense, kind, about, size));
        }
    }
    all
}

/// The text of a recipe without a file, such as `moba_80m`, from the `dense` text of its size; `None` for another name.
pub fn sibling(name: &str, dense: &str) -> Option<String> {
    let (kind, size) = name.rsplit_once('_')?;
    let (kind, about) = KINDS.into_iter().find(|row| row.0 == kind)?;
    let size = SIZES.iter().find(|row| row.name == size)?;
    Some(with_edits(dense, kind, about, size))
}

fn with_edits(dense: &str, kind: &str, about: &str, size: &Size) -> String {
    // The first line is `# 80M parameters with dense causal …`.
    let (count, _) = dense.split_once(" parameters with ").expect("the first line names a size");
    let mut all = vec![("# ", format!("{count} parameters with {about}"))];
    all.extend(edits(kind, size));
    all.into_iter().fold(dense.to_owned(), |text, (start, new)| with_line(&text, start, &new))
}

/// The lines of a dense recipe, by how they begin, that a kind replaces.
fn edits(kind: &str, size: &Size) -> Vec<(&'static str, String)> {
    let is_staged = size.name == "1p7b";
    // Blocks of 64, and the budget that all sparse kinds have.
    let chosen = |more: &str| {
        if !is_staged {
            format!("num_selected_blocks = 16 # a budget of 1024 tokens, as for the other sparse kinds{more}")
        } else {
            let more = more.replace("paper's 64", "paper's 64 blocks");
            format!("# 1024 tokens, as in swa_1p7b.toml (dma_1p7b.toml: 2048){more}.\nnum_selected_blocks = 16")
        }
    };
    let own_block = chosen(", the query's own block among them");
    let title = ("# (Trainable", "# arXiv:2508.02124v1 (Trainable Dynamic Mask Sparse Attention).".to_owned());
    match kind {
        "mla" => {
            let rank = size.kv_lora_rank;
            let slip = "# The table gives this row a window of 1024; MLA has none, and the 200M row has a dash: taken \
                 as a slip.\n";
            let attention = format!(
                "kind = \"mla\" # without query compression\nkv_lora_rank = {rank}\n{}\
                 qk_rope_head_dim = 64 # [reading] as DeepSeek-V2's; half a head\n\
                 qk_norm = true # ours: DeepSeek-V2 has no norms of queries and keys, with which MLA learns faster \
                 here",
                if size.name == "80m" { slip } else { "" }
            );
            let heads = format!(
                "num_key_value_heads = {} # MLA makes keys and values for every head; its cache holds the latent \
                 alone",
                size.num_heads
            );
            let mut all = vec![("num_key_value_heads", heads), ("kind = ", attention)];
            if rank.contains("[reading]") {
                let marks = "# Marks: [paper] stands in its table or text; [reading] fills a gap in it, with the \
                     reason; the rest is ours.\n\
                     # EXTRAPOLATION: the paper has no MLA row at this size. This is its MHA row with a latent of a \
                     quarter of the width, as\n# in its smaller MLA rows.";
                all.push(("# Marks: ", marks.to_owned()));
            }
            if size.name == "80m" {
                let inner = "intermediate_size = 2304 # [reading] 3 x hidden_size: with the heads below 87M parameters \
                     besides the embedding";
                all.push(("intermediate_size", inner.to_owned()));
            }
            all
        }
        "moba" => {
            let attention = format!(
                "kind = \"moba\"\n\
                 select_block_size = 64 # the paper (arXiv:2502.13189) has 3 blocks of 512 for rows of 8192 tokens\n\
                 {own_block}"
            );
            vec![title, ("kind = ", attention)]
        }
        "infllm_v2" => {
            let blocks = chosen("; the paper's 64 hold two of these rows");
            let attention = format!(
                "kind = \"infllm_v2\"\ncompress_block_size = 32 # arXiv:2509.24663: means of 32 keys every 16\n\
                 compress_stride = 16\nselect_block_size = 64\n{blocks}\n\
                 num_local_blocks = 8 # half of them, as in the paper"
            );
            vec![title, ("kind = ", attention)]
        }
        "cowa" => {
            let longest = if is_staged { "8128 # the rows of the second stage" } else { "1984 # seq_len" };
            let attention = format!(
                "kind = \"cowa\"\n\
                 # As published: 64 first tokens, a window of 1024, and the far past in one band for each KV head.\n\
                 sink_tokens = 64\nnear_window = 1024\nfar_reach = {longest} less the first tokens"
            );
            vec![title, ("kind = ", attention)]
        }
        // MSA: the indexer has parameters, a loss, and a warm-up.
        _ => {
            let ([parameters, indexer], [warmup, steps]) = (size.parameters, size.msa_steps);
            let inner = format!(
                "# [reading] The other kinds have 3 x hidden_size. The indexer takes {indexer} parameters, which the \
                 feed-forward layers give\n# up here, so that all kinds have {parameters} parameters besides the \
                 embedding.\nintermediate_size = {}",
                size.msa_intermediate_size
            );
            let attention = format!(
                "kind = \"msa\"\n\
                 # The paper (arXiv:2606.13392) has 16 blocks of 128; it finds no difference between 32, 64 and 128.\n\
                 select_block_size = 64\n{own_block}\n\
                 num_local_blocks = 8 # ours, the paper has 1: 0.12 to 0.17 nats better at 80M and rows of 32,768 \
                 (lab/docs/results.md)\nindex_loss_weight = 1.0 # [reading] the default of the published kernels"
            );
            let stage = format!(
                "[[stage]] # dense attention, while the indexer learns from all keys\n\
                 steps = {warmup} # ours: the warm-up of the learning rate; the paper has 40B of 3T tokens\n\
                 index_warmup = true\n"
            );
            let mut all = vec![title, ("intermediate_size", inner), ("kind = ", attention)];
            if is_staged {
                let stages = "# TWO STAGES: 32B tokens at length 2048, whose first 1.6B warm the indexer up, then 8B \
                     at length 8192 with rope_theta\n# raised to 100,000.";
                let steps = format!(
                    "steps = {steps} # [reading] 32B of the paper's 40B tokens, so 32,000 of its 40,000 steps, with \
                     the warm-up"
                );
                all.extend([("# TWO STAGES", stages.to_owned()), ("steps = 32000", steps)]);
                all.push(("[[stage]]", format!("{stage}\n[[stage]]")));
            } else {
                all.push(("[optimizer]", format!("{stage}\n[[stage]]\nsteps = {steps}\n\n[optimizer]")));
            }
            all
        }
    }
}

/// The text with `new` in the place of its first line that begins with `start`. Panics if there is none.
fn with_line(text: &str, start: &str, new: &str) -> String {
    let mut lines = text.lines().map(str::to_owned).collect::<Vec<_>>();
    let found = lines.iter_mut().find(|line| line.starts_with(start));
    *found.unwrap_or_else(|| panic!("the dense recipe has no line that begins with {start}")) = new.to_owned();
    lines.join("\n") + "\n"
}
