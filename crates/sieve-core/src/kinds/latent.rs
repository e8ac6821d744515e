//! Multi-head latent attention (MLA, arXiv:2405.04434): keys and values are projections of one latent per token.

use super::dense::output_projection;
use super::settings::{AttentionPreset, Settings, Sizes, derived, whole};
use super::sizes::{F32, LatentSizes};
use super::{
    Activations, AttentionOp, BackwardCall, ConfigKey, Cost, Exchanged, Exported, HasFacts, HeadWidths, KeptCall,
    KeyReads, Kind, KindFacts, Launched, LayerFlops, ParamSpec, Part, Projections, Stock, StockClass,
};
use crate::keys::{MAX_WIDTH, keys};
use crate::model::{ModelShape, window_pairs};
use crate::recipe::{ModelSection, Rules};
use serde_json::{Value, json};
use toml::Table;

keys! {
    /// Sizes of multi-head latent attention (arXiv:2405.04434, section 2.1), without query compression.
    ///
    /// `c = RMSNorm(x W_DKV)`; per head `k_C = c W_UK` and `v = c W_UV`, both of the model's `head_dim`; one
    /// `k_R = RoPE(x W_KR)` for all heads; `q = [x W_QC ; RoPE(x W_QR)]`. Keys and values exist per query head, so
    /// `num_kv_heads` equals `num_heads`. With `qk_norm`, which the paper does not have, RMSNorm is applied to each
    /// head's q and k, `[k_C ; x W_KR]`, before the rotation.
    ///
    /// Parameters of a layer: W_Q `[num_heads * (head_dim + qk_rope_head_dim), d_model]`, W_DKV and W_KR together
    /// `[kv_lora_rank + qk_rope_head_dim, d_model]`, the latent's norm `[kv_lora_rank]`, W_UK and W_UV together
    /// `[num_heads * 2 * head_dim, kv_lora_rank]`, W_O `[d_model, num_heads * head_dim]`; with `qk_norm` a weight of
    /// [`qk_norm_dim`](Self::qk_norm_dim) numbers for queries and one for keys, which all heads share.
    #[derive(Copy, Eq, Hash)]
    pub struct MlaShape {
        /// Sets the keys below to DeepSeek-V2's values (arXiv:2405.04434, section 2.1): a latent of four heads, a
        /// rotated part of half a head. As an override it replaces the recipe's values.
        text preset: Option<AttentionPreset>,
        /// Width of the latent c that keys and values are made from (`d_c`).
        #[key(filled("a quarter of `model.hidden_size`"), optional, size(MAX_WIDTH))]
        pub kv_lora_rank: usize,
        /// Width of the rotated part of queries and keys (`d_r`); even.
        #[key(filled("half of `model.head_dim`"), optional, size(MAX_WIDTH))]
        pub qk_rope_head_dim: usize,
        /// Whether each head's queries and keys go through RMSNorm with a weight before the rotation. An addition of
        /// ours, with which MLA learns faster; the paper has none.
        pub qk_norm: bool = true,
    }
}

impl MlaShape {
    /// Width of the norms of queries and keys, for heads of `head_dim`; 0 without norms.
    pub fn qk_norm_dim(&self, head_dim: usize) -> usize {
        if self.qk_norm { head_dim + self.qk_rope_head_dim } else { 0 }
    }

    /// The sizes of arXiv:2405.04434, section 2.1, for heads of `head_dim`.
    pub fn published(head_dim: usize) -> Self {
        Self { kv_lora_rank: 4 * head_dim, qk_rope_head_dim: Self::half_a_head(head_dim), qk_norm: false }
    }

    /// Default width of the rotated part: half a head, rounded up to an even number because rotation works on pairs.
    pub(crate) fn half_a_head(head_dim: usize) -> usize {
        (head_dim / 2).next_multiple_of(2).max(2)
    }
}

impl Settings for MlaShape {
    fn example(head_dim: usize) -> Self {
        Self::published(head_dim)
    }

    fn resolve(attention: &mut Table, sizes: Sizes) {
        derived(attention, "kv_lora_rank", || whole((sizes.hidden_size? / 4).max(1)));
        derived(attention, "qk_rope_head_dim", || whole(MlaShape::half_a_head(sizes.head_dim?)));
    }

    /// The keys of `[model]` about norms, biases and rotation do not go with MLA, and every head has a key of its own.
    fn check(&self, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        rules.require(
            self.qk_rope_head_dim.is_multiple_of(2),
            "attention.qk_rope_head_dim",
            format!("is {}, but rotary embedding turns pairs", self.qk_rope_head_dim),
            format!("use {}", self.qk_rope_head_dim + 1),
        );
        // Without `[model]`, which could not be read, there is nothing more to compare.
        let Some(model) = model else { return };
        for (key, given) in [
            ("model.qk_norm", !model.qk_norm),
            ("model.qkv_bias", model.qkv_bias),
            ("model.rope_scaling", model.rope_scaling.is_some()),
        ] {
            rules.require(
                !given,
                key,
                "does not go with kind = \"mla\"",
                "leave it out; attention.qk_norm says whether MLA norms queries and keys",
            );
        }
        rules.require(
            model.rope_layers.is_none(),
            "model.rope_layers",
            "does not go with kind = \"mla\", whose heads have rotated channels of their own",
            "leave it out, or choose a different kind",
        );
        let (heads, kv_heads) = (model.num_attention_heads, model.num_key_value_heads);
        rules.require(
            heads == kv_heads,
            "model.num_key_value_heads",
            format!("is {kv_heads}, but kind = \"mla\" has keys and values for each of its {heads} heads"),
            format!("set model.num_key_value_heads to {heads}; the cache holds only the latent"),
        );
    }
}

/// Epsilon of the latent's norm in `transformers`, whatever `rms_norm_eps` says.
pub const DEEPSEEK_LATENT_EPS: f64 = 1e-6;

impl HasFacts for MlaShape {
    const FACTS: KindFacts = KindFacts { projections: Projections::Latent, ..KindFacts::GROUPED };
}

impl Kind for MlaShape {
    /// Each tensor by our name and by DeepSeek's.
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let (d_model, num_heads, head_dim) = (layer.d_model, layer.num_heads, layer.head_dim);
        let Self { kv_lora_rank: rank, qk_rope_head_dim: rope, qk_norm } = *self;
        let gemm = |ours: &str, theirs: &str, dims| {
            let name = |name: &str| format!("self_attn.{name}.weight");
            ParamSpec::gemm(&name(ours), &name(theirs), dims, Part::Attention)
        };
        let norm = |ours: &str, theirs: &str, width| {
            let name = |name: &str| format!("self_attn.{name}.weight");
            ParamSpec::vectors(&name(ours), &name(theirs), &[width], Part::Norms)
        };
        let mut all = vec![
            gemm("q_proj", "q_proj", [num_heads * (head_dim + rope), d_model]),
            gemm("kv_a_proj", "kv_a_proj_with_mqa", [rank + rope, d_model]),
            norm("kv_a_norm", "kv_a_layernorm", rank),
            // In f32, since decoding multiplies it into other weights.
            gemm("kv_b_proj", "kv_b_proj", [num_heads * 2 * head_dim, rank]).in_f32(),
        ];
        if qk_norm {
            all.extend(["q_norm", "k_norm"].map(|name| norm(name, name, self.qk_norm_dim(head_dim))));
        }
        all.push(output_projection(layer));
        all
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        window_pairs(seq_len, seq_len)
    }

    fn latent(&self, head_dim: usize) -> Option<LatentSizes> {
        let has_norm = self.qk_norm_dim(head_dim) > 0;
        Some(LatentSizes { rank: self.kv_lora_rank, rope_width: self.qk_rope_head_dim, has_norm })
    }

    fn label(&self) -> Option<String> {
        Some(format!("rank {}", self.kv_lora_rank))
    }

    fn reads_words(&self) -> Option<String> {
        None
    }

    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        let norms = if self.qk_norm { "normed" } else { "not normed" };
        vec![format!("rotated part {}", self.qk_rope_head_dim), format!("queries and keys {norms}")]
    }

    fn set_head_width(&mut self, head_dim: usize) {
        self.qk_rope_head_dim = Self::half_a_head(head_dim);
    }
}

impl Cost for MlaShape {
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        let (d_model, q_width) = (layer.d_model as f64, layer.q_width() as f64);
        let (rank, rope) = (self.kv_lora_rank as f64, self.qk_rope_head_dim as f64);
        let q = q_width + layer.num_heads as f64 * rope;
        // W_Q, W_DKV, W_KR and W_O have `d_model` rows or columns, W_UK and W_UV `rank`.
        let weights = d_model * (q + rank + rope + q_width) + 2.0 * rank * q_width;
        LayerFlops { weights, per_pair: q + q_width, per_scored_key: 0.0, per_learned_key: 0.0 }
    }

    /// The latent with the rotated key, the normed latent, packed q, k and v, and the output. With q/k-norm also the
    /// packed tensor before the norms, which the backward pass recomputes.
    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        let (q, heads) = (call.layer.q_width() as u64, call.layer.num_heads as u64);
        let (rank, rope) = (self.kv_lora_rank as u64, self.qk_rope_head_dim as u64);
        let queries = q + heads * rope;
        let before_norms = if self.qk_norm { queries + 2 * q } else { 0 };
        Activations { values: (rank + rope) + rank + before_norms + (2 * queries + q) + q, bytes: F32 * heads }
    }

    /// Queries and keys are wider than values by the rotated part. The gradients of q, k and v before packing exist
    /// only after the packed gradient is freed.
    fn packed_width(&self, layer: &ModelShape) -> u64 {
        (3 * layer.q_width() + 2 * layer.num_heads * self.qk_rope_head_dim) as u64
    }

    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        call.of_neighbours(self.qk_rope_head_dim, call.seq_len)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let latent = (self.kv_lora_rank + self.qk_rope_head_dim) as u64 * value_bytes;
        let key_factors = if self.qk_norm { 4 * layer.num_heads as u64 } else { 0 };
        let token = latent + key_factors;
        [token, token * seq_len as u64]
    }

    /// Keys and values of each head, with which a token has the probability of a pass over the whole text.
    fn cache_on_host(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let token = (2 * layer.q_width() + layer.num_heads * self.qk_rope_head_dim) as u64 * value_bytes;
        [token, token * seq_len as u64]
    }

    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        let (q, heads) = (layer.q_width() as u64, layer.num_heads as u64);
        let (rank, rope) = (self.kv_lora_rank as u64, self.qk_rope_head_dim as u64);
        Exchanged { split: q + heads * rope, shared: rank + rope, kept_outputs: q, kept_shared: rank, again: 0 }
    }
}

impl Launched for MlaShape {
    fn reads(&self) -> &'static [KeyReads] {
        &[KeyReads::Neighbours]
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::LatentAttention]
    }

    fn gpu_gap(&self, layer: &ModelShape, widths: HeadWidths) -> Option<String> {
        let (width, rope) = (layer.head_dim, self.qk_rope_head_dim);
        let HeadWidths { step, most } = widths;
        let fits = [width, rope, width + rope].into_iter().all(|width| widths.takes(width));
        (!fits).then(|| format!("heads of {width} + {rope} are not multiples of {step} with a sum up to {most}"))
    }
}

impl Exported for MlaShape {
    fn config_keys(&self, _layer: &ModelShape) -> Value {
        json!({
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "mla_qk_norm": self.qk_norm,
        })
    }

    fn config_key<'a>(&self, key: &'a str) -> ConfigKey<'a> {
        match key {
            // `qk_norm` in an export is the one of `[model]`.
            "qk_norm" => ConfigKey { name: "mla_qk_norm", is_needed: true },
            key => ConfigKey::named(key),
        }
    }

    /// `DeepseekV3ForCausalLM`, if all layers are MLA. The error says what the class lacks; `None` for mixed layers.
    fn stock(&self, model: &ModelShape) -> Result<Stock, Option<&'static str>> {
        if !model.is_uniform() {
            return Err(None);
        }
        if self.qk_norm {
            return Err(Some(
                "DeepseekV3ForCausalLM has no norms of queries and keys in each head (attention.qk_norm)",
            ));
        }
        if model.residual_scale {
            return Err(Some("DeepseekV3ForCausalLM has no residual scales (model.residual_scale = true)"));
        }
        if model.rms_norm_eps != DEEPSEEK_LATENT_EPS {
            return Err(Some("DeepseekV3ForCausalLM normalises latents with an epsilon of 1e-6 (model.rms_norm_eps)"));
        }
        let keys = json!({
            "q_lora_rank": null,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "qk_nope_head_dim": model.head_dim,
            "v_head_dim": model.head_dim,
            // The class reads the width of its rotary tables from `head_dim`.
            "head_dim": self.qk_rope_head_dim,
            "rope_interleave": false,
            // Layers from this index on would have experts.
            "first_k_dense_replace": model.num_layers,
            "num_nextn_predict_layers": 0,
        });
        Ok(Stock { class: StockClass::DeepseekV3, keys })
    }
}
