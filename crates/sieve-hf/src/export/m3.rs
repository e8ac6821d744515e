//! MiniMax-M3's text class, whose layers have MSA or dense attention, and dense feed-forward layers or experts:
//! `MiniMaxM3VLForCausalLM` of `transformers`, and `MiniMaxM3SparseForCausalLM` of vLLM.
//!
//! Its norms multiply by `w + 1`, so 1 is subtracted. A feed-forward layer computes `(up + beta) * gate *
//! sigmoid(alpha * gate)`, with gate and up clamped to a limit. vLLM reads the three numbers from `config.json`: alpha
//! 1, beta 0 and a limit that no activation reaches are a recipe's `up * silu(gate)`. In `transformers` beta is 1
//! whatever `config.json` says. There the up projection is stored times [`UP_SCALE`] and the down projection divided by
//! it, which is exact, and changes `up` by `beta / UP_SCALE`: less than the rounding of f32 where `up` is above 2^-8.
use super::form::Form;
use crate::CheckpointError;
use serde_json::{Value, json};
use sieve_core::kinds::{FULL_ATTENTION, MsaAndDense, ParamSpec, Rows};
use sieve_core::{ModelShape, Refusal};

/// The factor on the up projections of an export for `transformers`, whose key of `config.json` is [`SCALE_KEY`].
pub(crate) const UP_SCALE: f32 = 4_294_967_296.0;
/// A key of Sieve that the class does not read; an import needs it to undo the factor.
pub(crate) const SCALE_KEY: &str = "swiglu_up_scale";
/// A limit that no activation reaches. PyTorch refuses it for float16, in which scaled activations would overflow.
pub(crate) const LIMIT: f64 = 1e30;
/// The name of an MSA layer in `layer_types`.
pub(crate) const SPARSE_ATTENTION: &str = "minimax_m3_sparse";
/// The width of heads and the size of blocks that vLLM's kernels take.
const VLLM_SIZE: usize = 128;

/// Refuses a model that the class `name` does not compute, by the recipe's key; `is_vllm`: it is vLLM's.
pub(super) fn fits(shape: &ModelShape, name: &str, is_vllm: bool) -> Result<(), CheckpointError> {
    let refused =
        |what: &str, hint: &str| CheckpointError::refused(format!("this model as {name}: {what}"), hint.to_owned());
    let MsaAndDense { msa, .. } = MsaAndDense::of(shape).map_err(|Refusal { what, hint }| refused(&what, &hint))?;
    let other_form = "leave the form out to get the class that computes this model";
    let any_size = "the form m3, for transformers, has any width of heads and any size of blocks";
    let rules = [
        (shape.qk_norm, "model.qk_norm is false, and the class norms queries and keys", other_form),
        (!shape.qkv_bias, "model.qkv_bias is true, and the class has no biases", other_form),
        (!shape.residual_scale, "model.residual_scale is true, and the class has no residual scales", other_form),
        (!shape.attention_sinks, "model.attention_sinks is true, and the class has no sinks", other_form),
        (shape.rope_layers.is_every(), "model.rope_layers has false, and the class rotates in every layer", other_form),
        (
            !is_vllm || shape.rope_scaling.is_none(),
            "model.rope_scaling is given, and the class does not scale its rotary frequencies",
            "the form m3, for transformers, scales them",
        ),
        (
            !is_vllm || shape.head_dim == VLLM_SIZE,
            &format!("model.head_dim is {}, and the class's kernels have heads of {VLLM_SIZE}", shape.head_dim),
            any_size,
        ),
        (
            !is_vllm || msa.select_block_size == VLLM_SIZE,
            &format!(
                "attention.select_block_size is {}, and the class's kernels have blocks of {VLLM_SIZE}",
                msa.select_block_size
            ),
            any_size,
        ),
    ];
    match rules.into_iter().find(|(holds, ..)| !holds) {
        None => Ok(()),
        Some((_, what, hint)) => Err(refused(what, hint)),
    }
}

/// The keys of `config.json` for a model that [`fits`].
pub(super) fn keys(shape: &ModelShape, is_vllm: bool) -> Value {
    let MsaAndDense { msa, is_msa } = MsaAndDense::of(shape).expect("it fits");
    let mut keys = json!({
        "dense_intermediate_size": shape.d_ff,
        "rotary_dim": shape.head_dim,
        "partial_rotary_factor": 1.0,
        "swiglu_alpha": 1.0,
        "swiglu_limit": LIMIT,
    });
    let marks = is_msa.iter().map(|is_msa| u8::from(*is_msa)).collect::<Vec<_>>();
    let more = if !is_vllm {
        let kinds = is_msa.iter().map(|is_msa| if *is_msa { SPARSE_ATTENTION } else { FULL_ATTENTION });
        json!({
            SCALE_KEY: UP_SCALE,
            "mlp_layer_types": vec!["dense"; shape.num_layers],
            "layer_types": kinds.collect::<Vec<_>>(),
            "index_n_heads": shape.num_kv_heads,
            "index_head_dim": shape.head_dim,
            "index_block_size": msa.select_block_size,
            "index_topk_blocks": msa.num_selected_blocks,
            "index_local_blocks": msa.num_local_blocks,
        })
    } else {
        json!({
            "hidden_act": "swigluoai",
            "swiglu_beta": 0.0,
            "tie_word_embeddings": false,
            "use_gemma_norm": true,
            "use_qk_norm": true,
            "qk_norm_type": "per_head",
            "attention_output_gate": false,
            "num_mtp_modules": 0,
            "moe_layer_freq": vec![0; shape.num_layers],
            "sparse_attention_config": {
                "use_sparse_attention": true,
                "sparse_attention_freq": marks,
                "sparse_disable_index_value": marks,
                "sparse_num_index_heads": shape.num_kv_heads,
                "sparse_index_dim": shape.head_dim,
                "sparse_block_size": msa.select_block_size,
                "sparse_topk_blocks": msa.num_selected_blocks,
                "sparse_local_block": msa.num_local_blocks,
                "sparse_init_block": 0,
                "sparse_score_type": "max",
            },
        })
    };
    if let (Value::Object(keys), Value::Object(more)) = (&mut keys, more) {
        keys.extend(more);
    }
    keys
}

/// The `config.json` of vLLM's class with these keys: vLLM knows the text model only inside a `minimax_m3_vl`.
pub(super) fn nested(text: Value) -> Value {
    let outside =
        ["architectures", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "torch_dtype"];
    let mut all = json!({ "model_type": "minimax_m3_vl", "dtype": text["dtype"] });
    for key in outside {
        all[key] = text[key].clone();
    }
    all["text_config"] = text;
    all
}

/// The tensors of a parameter: the name, number of rows and form of each.
pub(super) fn parts(spec: &ParamSpec, is_vllm: bool) -> Vec<(String, usize, Form)> {
    let is_scaled = !is_vllm;
    if let [(gate, d_ff), _up] = spec.theirs.as_slice()
        && is_scaled
        && gate.ends_with("mlp.gate_proj.weight")
    {
        let up = Form { from_row: *d_ff, times: UP_SCALE, ..Form::PLAIN };
        return vec![(gate.replace("gate_proj", "gate_up_proj"), 2 * d_ff, up)];
    }
    let parts = spec.theirs.iter().map(|(name, rows)| {
        let form = match spec.rows {
            Rows::Vectors => Form { add: -1.0, ..Form::PLAIN },
            _ if is_scaled && name.ends_with("mlp.down_proj.weight") => Form { times: 1.0 / UP_SCALE, ..Form::PLAIN },
            _ => Form::PLAIN,
        };
        let name = if is_scaled { name.replace("self_attn.index_", "self_attn.indexer.") } else { name.clone() };
        (name, *rows, form)
    });
    parts.collect()
}
