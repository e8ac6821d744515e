//! Dense causal attention with grouped queries: a query sees all earlier keys of its document.

use super::param::{ParamSpec, Part};
use super::sizes::F32;
use super::{
    Activations, AttentionOp, BackwardCall, Cost, Exchanged, Exported, HasFacts, KeptCall, KeyReads, Kind, KindFacts,
    Launched, LayerFlops, Stock, StockClass,
};
use crate::model::{ModelShape, window_pairs};
use serde_json::{Value, json};

/// Dense attention, which has no sizes of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dense;

impl HasFacts for Dense {
    const FACTS: KindFacts = KindFacts {
        is_one_op: true,
        takes_sinks: true,
        has_one_order: true,
        stock_layer_type: Some(super::FULL_ATTENTION),
        ..KindFacts::GROUPED
    };
}

impl Kind for Dense {
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let mut all = grouped_projections(layer);
        if layer.attention_sinks {
            let name = "self_attn.sinks";
            all.push(ParamSpec::vectors(name, name, &[layer.num_heads], Part::Attention));
        }
        all.push(output_projection(layer));
        all
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        window_pairs(seq_len, seq_len)
    }

    fn label(&self) -> Option<String> {
        None
    }

    fn reads_words(&self) -> Option<String> {
        None
    }
}

impl Cost for Dense {
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        grouped_flops(layer)
    }

    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        grouped_activations(call.layer)
    }

    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        call.of_neighbours(0, call.seq_len)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let kv = key_and_value(layer, value_bytes);
        [kv, kv * seq_len as u64]
    }

    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Exchanged::of_one_op(layer)
    }
}

impl Launched for Dense {
    fn reads(&self) -> &'static [KeyReads] {
        &[KeyReads::Neighbours]
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::Attention]
    }
}

impl Exported for Dense {
    fn config_keys(&self, _layer: &ModelShape) -> Value {
        json!({})
    }

    fn stock(&self, model: &ModelShape) -> Result<Stock, Option<&'static str>> {
        grouped_stock(model)
    }
}

/// The packed projections of grouped queries, keys and values, with their biases and the norms of heads.
pub(super) fn grouped_projections(layer: &ModelShape) -> Vec<ParamSpec> {
    let (q, kv) = (layer.q_width(), layer.kv_width());
    let parts = |kind: &str| {
        let part = |name: &str, rows| (format!("self_attn.{name}_proj.{kind}"), rows);
        vec![part("q", q), part("k", kv), part("v", kv)]
    };
    let rows = q + 2 * kv;
    let weight = ParamSpec {
        theirs: parts("weight"),
        ..ParamSpec::gemm("self_attn.qkv.qkv_proj.weight", "", [rows, layer.d_model], Part::Attention)
    };
    let mut all = vec![weight];
    if layer.qkv_bias {
        let bias = ParamSpec::vectors("self_attn.qkv.qkv_bias", "", &[rows], Part::Attention);
        all.push(ParamSpec { theirs: parts("bias"), ..bias });
    }
    if layer.qk_norm {
        all.extend(head_norms("", "qkv", layer.head_dim));
    }
    all
}

/// The norms of queries and keys of a module `ours`; `theirs` begins their names in `transformers`.
pub(super) fn head_norms(theirs: &str, ours: &str, width: usize) -> [ParamSpec; 2] {
    ["q_norm", "k_norm"].map(|norm| {
        let names = [format!("self_attn.{ours}.{norm}.weight"), format!("self_attn.{theirs}{norm}.weight")];
        ParamSpec::vectors(&names[0], &names[1], &[width], Part::Norms)
    })
}

/// The projection of the attention's output.
pub(super) fn output_projection(layer: &ModelShape) -> ParamSpec {
    let name = "self_attn.o_proj.weight";
    ParamSpec::gemm(name, name, [layer.d_model, layer.q_width()], Part::Attention)
}

/// Multiply-adds of grouped-query attention.
pub(super) fn grouped_flops(layer: &ModelShape) -> LayerFlops {
    let (d_model, q_width, kv_width) = (layer.d_model as f64, layer.q_width() as f64, layer.kv_width() as f64);
    LayerFlops {
        weights: 2.0 * d_model * (q_width + kv_width),
        per_pair: 2.0 * q_width,
        per_scored_key: 0.0,
        per_learned_key: 0.0,
    }
}

/// What grouped-query attention keeps for its backward pass: q, k and v (before norm and rotation if these are in the
/// same op), the output, and the log-sum-exp.
pub(super) fn grouped_activations(layer: &ModelShape) -> Activations {
    let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
    Activations { values: q + 2 * kv + q, bytes: F32 * layer.num_heads as u64 }
}

/// The `transformers` class of a model whose layers are dense or have one sliding window, with its keys of
/// `config.json`. No such class has residual scales.
pub(super) fn grouped_stock(model: &ModelShape) -> Result<Stock, Option<&'static str>> {
    if model.attention_sinks {
        return Err(Some("no class of grouped-query attention has sinks (model.attention_sinks = true)"));
    }
    let attentions = model.attentions().into_iter().map(|(attention, _)| attention);
    let mut windows = attentions.filter_map(|attention| attention.as_kind().cached_window());
    let window = windows.next();
    let layers = (0..model.num_layers).map(|layer| model.attention_of(layer).kind().facts().stock_layer_type);
    // `None`: no class of grouped-query attention has a layer of this kind.
    let layer_types = layers.collect::<Option<Vec<_>>>();
    let Some(layer_types) = layer_types.filter(|_| !model.residual_scale && windows.next().is_none()) else {
        return Err(None);
    };
    let windowed = window.is_some();
    let keys = json!({
        "use_sliding_window": windowed,
        "sliding_window": window,
        // Layers from this index on have the window.
        "max_window_layers": if windowed { 0 } else { model.num_layers },
        "layer_types": layer_types,
    });
    Ok(Stock { class: StockClass::Grouped { windowed }, keys })
}

/// Bytes of a token's K and V.
pub(super) fn key_and_value(layer: &ModelShape, value_bytes: u64) -> u64 {
    2 * layer.kv_width() as u64 * value_bytes
}
