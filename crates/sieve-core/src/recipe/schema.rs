//! Every section and key a recipe may hold, with its type. A test compares this list with the serde types.

use super::AttentionKind;

/// The type of a key's value.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// A whole number of at least 0.
    Integer,
    /// A number, whole or not.
    Number,
    /// `true` or `false`.
    Bool,
    /// A string.
    String,
    /// A list of strings.
    Strings,
    /// A list of whole numbers of at least 0.
    Integers,
    /// A list of numbers.
    Numbers,
    /// One of `built`; `planned` names are refused as not built yet.
    Choice {
        built: &'static [&'static str],
        planned: &'static [&'static str],
    },
    /// A table with its own keys.
    Table(&'static [Key]),
}

/// One key of a section.
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) required: bool,
}

/// One section.
pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) keys: &'static [Key],
    pub(super) required: bool,
}

const fn needed(name: &'static str, kind: Kind) -> Key {
    Key {
        name,
        kind,
        required: true,
    }
}

const fn optional(name: &'static str, kind: Kind) -> Key {
    Key {
        name,
        kind,
        required: false,
    }
}

const fn choice(built: &'static [&'static str]) -> Kind {
    Kind::Choice {
        built,
        planned: &[],
    }
}

use Kind::{Bool, Integer, Integers, Number, Numbers, String, Strings, Table};

/// Every section, in the order a recipe writes them.
pub(super) const SECTIONS: &[Section] = &[
    Section {
        name: "model",
        required: true,
        keys: &[
            needed("hidden_size", Integer),
            needed("intermediate_size", Integer),
            needed("num_hidden_layers", Integer),
            needed("num_attention_heads", Integer),
            needed("num_key_value_heads", Integer),
            needed("head_dim", Integer),
            optional("vocab_size", Integer),
            optional("rope_theta", Number),
            optional("rms_norm_eps", Number),
            needed("tie_word_embeddings", Bool),
            needed("max_position_embeddings", Integer),
            optional("initializer_range", Number),
            optional("residual_scale", Bool),
            optional("layer_types", Strings),
        ],
    },
    Section {
        name: "attention",
        required: true,
        keys: &[
            needed("kind", choice(&["mha", "swa", "mla", "nsa", "dma"])),
            optional("sliding_window", Integer),
            optional("kv_lora_rank", Integer),
            optional("qk_rope_head_dim", Integer),
            optional("compress_block_size", Integer),
            optional("compress_stride", Integer),
            optional("compress", choice(&["mlp", "mean"])),
            optional("compress_hidden_size", Integer),
            optional("select_block_size", Integer),
            optional("num_selected_blocks", Integer),
            optional("window_size", Integer),
            optional("shared_kv", Bool),
            optional("keep_window_size", Integer),
            optional("bias", choice(&["exp", "linear"])),
            optional("a_init", Number),
            optional("recency", choice(&["none", "slope"])),
            optional("shortest_period", Number),
            optional("longest_period", Number),
            optional("local_window_size", Integer),
        ],
    },
    Section {
        name: "tokenizer",
        required: true,
        keys: &[
            optional("path", String),
            optional("numbers", Integer),
            optional(
                "train",
                Table(&[
                    needed("vocab_size", Integer),
                    optional("sample_bytes", Integer),
                ]),
            ),
        ],
    },
    Section {
        name: "data",
        required: true,
        keys: &[
            optional("paths", Strings),
            optional("weights", Numbers),
            optional("fallback", choice(&["sieve"])),
            optional(
                "format",
                choice(&["auto", "text", "jsonl", "parquet", "mqar"]),
            ),
            optional("text_column", String),
            optional("max_bytes", Integer),
            optional("max_document_bytes", Integer),
            optional("skip_invalid", Bool),
            optional("deduplicate", Bool),
            optional("validation_fraction", Number),
            optional("cache_dir", String),
            optional(
                "mqar",
                Table(&[
                    needed("vocab_size", Integer),
                    optional("vocab_sizes", Integers),
                    needed("seq_lens", Integers),
                    needed("num_pairs", Integers),
                    needed("num_samples", Integers),
                    optional("num_test_samples", Integer),
                    optional("noise", choice(&["zeros", "uniform", "disjoint"])),
                    optional("power", Number),
                    optional("seed", Integer),
                ]),
            ),
        ],
    },
    Section {
        name: "training",
        required: true,
        keys: &[
            // Filled in from the stages where there are any.
            needed("steps", Integer),
            needed("seq_len", Integer),
            needed("local_batch_size", Integer),
            optional("global_batch_size", Integer),
            optional("max_norm", Number),
            optional("seed", Integer),
            optional("deterministic", Bool),
            optional("one_document_per_row", Bool),
            optional("guard_spike_factor", Number),
            optional("guard_patience", Integer),
        ],
    },
    Section {
        name: "optimizer",
        required: true,
        keys: &[
            optional("name", choice(&["AdamW"])),
            needed("lr", Number),
            optional("beta1", Number),
            optional("beta2", Number),
            optional("eps", Number),
            optional("weight_decay", Number),
        ],
    },
    Section {
        name: "lr_scheduler",
        required: true,
        keys: &[
            needed("warmup_steps", Integer),
            needed("decay_ratio", Number),
            optional("decay_type", choice(&["linear", "sqrt", "cosine"])),
            optional("min_lr_factor", Number),
        ],
    },
    Section {
        name: "checkpoint",
        required: false,
        keys: &[
            optional("interval", Integer),
            optional("keep_latest_k", Integer),
            optional("at_start", Bool),
            optional("folder", String),
        ],
    },
    Section {
        name: "metrics",
        required: false,
        keys: &[
            optional("log_freq", Integer),
            optional("enable_tensorboard", Bool),
        ],
    },
    Section {
        name: "validation",
        required: false,
        keys: &[
            optional("interval", Integer),
            optional("steps", Integer),
            optional("paths", Strings),
        ],
    },
    Section {
        name: "activation_checkpoint",
        required: false,
        keys: &[
            optional("mode", choice(&["none", "selective", "full"])),
            optional("selective_ac_option", Integer),
        ],
    },
    Section {
        name: "generation",
        required: false,
        keys: &[
            optional("prompts", Strings),
            optional("max_new_tokens", Integer),
        ],
    },
];

/// One `[[stage]]`. `steps` is filled in from `tokens`, and the rest from the sections the values come from.
pub(super) const STAGE: Section = Section {
    name: "stage",
    required: false,
    keys: &[
        needed("steps", Integer),
        optional("tokens", Integer),
        optional("seq_len", Integer),
        optional("rope_theta", Number),
        optional("window", Integer),
        optional("paths", Strings),
        optional("local_batch_size", Integer),
        optional("global_batch_size", Integer),
    ],
};

/// Sections and keys the recipe format reserves for what is not built yet.
pub(super) const PLANNED: &[&str] = &["parallelism"];

/// The keys of `[attention]` that go with `kind`, and whether the kind needs them.
pub(super) fn attention_keys(kind: &str) -> &'static [(&'static str, bool)] {
    match kind {
        "swa" => &[("sliding_window", true)],
        "mla" => &[("kv_lora_rank", true), ("qk_rope_head_dim", true)],
        "nsa" => &[
            ("compress_block_size", true),
            ("compress_stride", true),
            ("compress", false),
            ("compress_hidden_size", false),
            ("select_block_size", true),
            ("num_selected_blocks", true),
            ("window_size", true),
            ("shared_kv", false),
        ],
        "dma" => &[
            ("keep_window_size", true),
            ("bias", false),
            ("a_init", false),
            ("recency", false),
            ("shortest_period", false),
            ("longest_period", false),
            ("local_window_size", false),
        ],
        _ => &[],
    }
}

/// The attention kinds that know `key`.
pub(super) fn attention_kinds_with(key: &str) -> Vec<&'static str> {
    let kinds = AttentionKind::ALL.map(AttentionKind::name);
    kinds
        .into_iter()
        .filter(|kind| attention_keys(kind).iter().any(|(name, _)| *name == key))
        .collect()
}

/// The section called `name`.
pub(super) fn section(name: &str) -> Option<&'static Section> {
    SECTIONS.iter().find(|section| section.name == name)
}

/// The key called `name` among `keys`.
pub(super) fn key(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|key| key.name == name)
}

/// The section that holds a key called `name`, for keys written in the wrong place.
pub(super) fn home_of(name: &str) -> Option<&'static str> {
    SECTIONS
        .iter()
        .find(|section| key(section.keys, name).is_some())
        .map(|section| section.name)
}

/// The candidate most like `name`, if any is like it at all.
pub(super) fn nearest(name: &str, candidates: &[&'static str]) -> Option<&'static str> {
    let likeness = |candidate: &str| {
        let (short, long) = if name.len() < candidate.len() {
            (name, candidate)
        } else {
            (candidate, name)
        };
        // `window` for `sliding_window`: a part of at least two fifths counts as like.
        let is_part = 5 * short.len() >= 2 * long.len() && long.contains(short);
        strsim::jaro_winkler(name, candidate).max(if is_part { 0.85 } else { 0.0 })
    };
    candidates
        .iter()
        .map(|candidate| (likeness(candidate), *candidate))
        .filter(|(score, _)| *score >= 0.75)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, candidate)| candidate)
}
