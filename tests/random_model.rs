//! Small models whose parameters, gates and norms included, are all random, and their checkpoints.
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::Flex;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use sieve_core::{ModelShape, Recipe};
use sieve_hf::{
    Checkpoint, CheckpointFiles, CheckpointState, DEFAULT_SHARD_BYTES, ExportDtype, ExportOptions, Kept,
    load_parameters, named_parameters,
};
use sieve_infer::{GenerateConfig, Generator, Sampling};
use sieve_nn::Qwen3;
use sieve_testing::cases;
use std::path::Path;

/// Number of rows of the embedding.
pub(crate) const VOCAB_SIZE: usize = 97;

/// One variant of each kind, by its name in [`kinds`], for tests that take long.
pub(crate) const ONE_OF_EACH: [&str; 9] =
    ["mha", "swa_sinks", "mla_norm", "nsa_mean", "dma_recency", "infllm_v2", "moba_shared", "msa", "cowa"];

/// Name, `[model]` lines and `[attention]` lines of each tested model: the kinds of attention (MLA in three forms, NSA
/// in two), the published architectures, and published architectures with sparse layers. Windows are far shorter than
/// any tested text.
pub(crate) fn kinds() -> Vec<[&'static str; 3]> {
    cases(
        r#"
        mha => tie_word_embeddings = true => kind = "mha"
        infllm_v2 => tie_word_embeddings = true => kind = "infllm_v2"\ncompress_block_size = 4\ncompress_stride = 2\n\
            select_block_size = 4\nnum_selected_blocks = 3\nnum_local_blocks = 1
        infllm_v2_hybrid => tie_word_embeddings = false\nlayer_types = ["sparse", "mha", "sparse"] \
            => kind = "infllm_v2"\ncompress_block_size = 6\ncompress_stride = 2\nselect_block_size = 4\n\
            num_selected_blocks = 4\nnum_local_blocks = 2
        moba => tie_word_embeddings = true\nresidual_scale = true => kind = "moba"\nselect_block_size = 4\n\
            num_selected_blocks = 3
        msa => tie_word_embeddings = false => kind = "msa"\nselect_block_size = 4\nnum_selected_blocks = 3
        msa_hybrid => tie_word_embeddings = true\nqk_norm = false\nlayer_types = ["mha", "sparse", "sparse"] \
            => kind = "msa"\nselect_block_size = 6\nnum_selected_blocks = 2
        infllm_v2_shared => tie_word_embeddings = true\nlayer_types = ["sparse", "mha", "shared"] \
            => kind = "infllm_v2"\ncompress_block_size = 4\ncompress_stride = 2\nselect_block_size = 4\n\
            num_selected_blocks = 4\nnum_local_blocks = 1
        moba_shared => tie_word_embeddings = false\nlayer_types = ["sparse", "shared", "shared"] \
            => kind = "moba"\nselect_block_size = 4\nnum_selected_blocks = 3
        msa_shared => tie_word_embeddings = true\nlayer_types = ["sparse", "shared", "sparse"] \
            => kind = "msa"\nselect_block_size = 4\nnum_selected_blocks = 3
        swa => tie_word_embeddings = false => kind = "swa"\nsliding_window = 7
        mha_sinks => tie_word_embeddings = true\nattention_sinks = true => kind = "mha"
        swa_sinks => tie_word_embeddings = false\nqk_norm = false\nattention_sinks = true\n\
            layer_types = ["swa", "mha", "swa"] => kind = "swa"\nsliding_window = 7
        dma => tie_word_embeddings = true\nresidual_scale = true => kind = "dma"\nkeep_window_size = 5\npreset = "paper"
        dma_recency => tie_word_embeddings = false => kind = "dma"\nkeep_window_size = 7\nbias = "linear"\n\
            recency = "slope"\nshortest_period = 3\nlongest_period = 20\nlocal_window_size = 3
        dma_hybrid => tie_word_embeddings = true\nlayer_types = ["dma", "mha", "dma"] => kind = "dma"\n\
            keep_window_size = 5\nbias = "linear"\nrecency = "slope"\nshortest_period = 4
        swa_hybrid => tie_word_embeddings = true\nlayer_types = ["swa", "mha", "swa"] => kind = "swa"\n\
            sliding_window = 7
        mixed => tie_word_embeddings = true\nlayer_types = ["sliding_attention", "msa", "sparse"] => kind = "dma"\n\
            keep_window_size = 5\nbias = "linear"\nrecency = "slope"\nshortest_period = 4\n\
            [attention.swa]\nsliding_window = 7\n\
            [attention.msa]\nselect_block_size = 4\nnum_selected_blocks = 3
        mixed_shared => tie_word_embeddings = false\nlayer_types = ["blocks", "sparse", "shared"] => kind = "swa"\n\
            sliding_window = 7\n[attention.blocks]\nkind = "infllm_v2"\ncompress_block_size = 4\n\
            compress_stride = 2\nselect_block_size = 4\nnum_selected_blocks = 4\nnum_local_blocks = 1
        cowa => tie_word_embeddings = true => kind = "cowa"\nsink_tokens = 2\nnear_window = 4\nfar_reach = 20
        cowa_hybrid => tie_word_embeddings = false\nqk_norm = false\nqkv_bias = true\n\
            layer_types = ["cowa", "mha", "cowa"] => kind = "cowa"\nsink_tokens = 0\nnear_window = 3\n\
            far_reach = 30\nnum_bands = 1
        mla => tie_word_embeddings = true => kind = "mla"\nkv_lora_rank = 24\nqk_rope_head_dim = 8\nqk_norm = false
        mla_norm => tie_word_embeddings = false => kind = "mla"\nkv_lora_rank = 24\nqk_rope_head_dim = 8
        mla_scaled => tie_word_embeddings = false\nresidual_scale = true => kind = "mla"\nkv_lora_rank = 24\n\
            qk_rope_head_dim = 8\nqk_norm = false
        nsa => tie_word_embeddings = true\nresidual_scale = true => kind = "nsa"\ncompress_block_size = 4\n\
            compress_stride = 2\ncompress = "mlp"\ncompress_hidden_size = 20\nselect_block_size = 4\n\
            num_selected_blocks = 4\nwindow_size = 7
        nsa_mean => tie_word_embeddings = false => kind = "nsa"\ncompress_block_size = 6\ncompress_stride = 3\n\
            compress = "mean"\nselect_block_size = 6\nnum_selected_blocks = 3\nwindow_size = 5\nshared_kv = false
        llama => tie_word_embeddings = true\nqk_norm = false => kind = "mha"
        llama_linear => tie_word_embeddings = false\nqk_norm = false\n\
            rope_scaling = { rope_type = "linear", factor = 2.5 } => kind = "mha"
        llama_llama3 => tie_word_embeddings = false\nqk_norm = false\n\
            rope_scaling = { rope_type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, \
            original_max_position_embeddings = 32 } => kind = "mha"
        mistral => tie_word_embeddings = false\nqk_norm = false => kind = "swa"\nsliding_window = 7
        qwen2 => tie_word_embeddings = true\nqk_norm = false\nqkv_bias = true\nlayer_types = ["mha", "swa", "swa"] \
            => kind = "swa"\nsliding_window = 7
        qwen2_yarn => tie_word_embeddings = true\nqk_norm = false\nqkv_bias = true\n\
            rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 32 } \
            => kind = "mha"
        llama_dma => tie_word_embeddings = true\nqk_norm = false\nlayer_types = ["dma", "mha", "dma"]\n\
            rope_scaling = { rope_type = "llama3", factor = 8.0, original_max_position_embeddings = 32 } \
            => kind = "dma"\nkeep_window_size = 5\nbias = "linear"\nrecency = "none"
        llama_windows => tie_word_embeddings = false\nqk_norm = false\nresidual_scale = true\n\
            layer_types = ["swa", "mha", "swa"] => kind = "swa"\nsliding_window = 7
        qwen2_dma => tie_word_embeddings = true\nqk_norm = false\nqkv_bias = true => kind = "dma"\n\
            keep_window_size = 5\nrecency = "slope"\nshortest_period = 4
        qwen2_nsa => tie_word_embeddings = false\nqk_norm = false\nqkv_bias = true\n\
            rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 32 } \
            => kind = "nsa"\ncompress_block_size = 4\ncompress_stride = 2\ncompress = "mlp"\n\
            compress_hidden_size = 20\nselect_block_size = 4\nnum_selected_blocks = 4\nwindow_size = 7\n\
            shared_kv = false
        ministral => tie_word_embeddings = false\nqk_norm = false\nlayer_types = ["swa", "mha", "swa"] \
            => kind = "swa"\nsliding_window = 7
        smollm3 => tie_word_embeddings = true\nqk_norm = false\nrope_layers = [true, false, true] => kind = "mha"
        smollm3_windows => tie_word_embeddings = false\nqk_norm = false\nlayer_types = ["swa", "mha", "swa"]\n\
            rope_layers = [true, true, false] => kind = "swa"\nsliding_window = 7
        nope => tie_word_embeddings = true\nrope_layers = [false] => kind = "mha"
        nope_mixed => tie_word_embeddings = true\nlayer_types = ["swa", "msa", "sparse"]\n\
            rope_layers = [true, false, false] => kind = "dma"\nkeep_window_size = 5\nbias = "linear"\n\
            recency = "slope"\nshortest_period = 4\n[attention.swa]\nsliding_window = 7\n\
            [attention.msa]\nselect_block_size = 4\nnum_selected_blocks = 3
        nope_nsa => tie_word_embeddings = false\nqk_norm = false\nqkv_bias = true\nrope_layers = [false, true, false]\n\
            rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 32 } \
            => kind = "nsa"\ncompress_block_size = 4\ncompress_stride = 2\ncompress = "mlp"\n\
            compress_hidden_size = 20\nselect_block_size = 4\nnum_selected_blocks = 4\nwindow_size = 7
        nope_blocks => tie_word_embeddings = false\nrope_layers = [false, true, false]\n\
            layer_types = ["sparse", "moba", "sparse"] => kind = "infllm_v2"\ncompress_block_size = 4\n\
            compress_stride = 2\nselect_block_size = 4\nnum_selected_blocks = 4\nnum_local_blocks = 1\n\
            [attention.moba]\nselect_block_size = 4\nnum_selected_blocks = 3
    "#,
    )
}

/// Positions of the models.
pub(crate) const CONTEXT: usize = 64;

/// A recipe with these lines: width 64, 3 layers, 4 query and 2 KV heads of width 16 unless a line says `head_dim`.
pub(crate) fn recipe(model: &str, attention: &str) -> Recipe {
    recipe_with_context(model, attention, CONTEXT)
}

/// As [`recipe`], with this many positions.
pub(crate) fn recipe_with_context(model: &str, attention: &str, context: usize) -> Recipe {
    // MLA needs a key and a value for every query head.
    let kv_heads = if attention.contains("mla") { 4 } else { 2 };
    let head_dim = if model.contains("head_dim") { "" } else { "head_dim = 16\n" };
    let text = format!(
        "[model]\nhidden_size = 64\nintermediate_size = 96\nnum_hidden_layers = 3\nnum_attention_heads = 4\n\
         num_key_value_heads = {kv_heads}\n{head_dim}vocab_size = {VOCAB_SIZE}\nmax_position_embeddings = \
         {context}\n{model}\n\
         [attention]\n{attention}\n[tokenizer]\npath = \"tokenizer.json\"\n[data]\npaths = [\"none\"]\n\
         [training]\nsteps = 1\nseq_len = 48\nlocal_batch_size = 1\n[optimizer]\nlr = 1e-3\n\
         [lr_scheduler]\nwarmup_steps = 0\ndecay_ratio = 0.0\n"
    );
    Recipe::load(&text, "a test's recipe", &[]).expect("the text above is valid")
}

/// A model of `recipe` with random values in every parameter, in f32.
pub(crate) fn random_model(recipe: &Recipe, seed: u64) -> Qwen3<Flex> {
    random_model_of(recipe, seed, DType::F32)
}

/// As [`random_model`] on any backend, with weights kept as `kept` says.
pub(crate) fn random_model_of<B: Backend>(recipe: &Recipe, seed: u64, kept: impl Into<Kept>) -> Qwen3<B> {
    let shape = recipe.model_shape(VOCAB_SIZE).expect("the recipe gives the vocabulary");
    load_parameters(Qwen3::new(&shape, 0, &Default::default()), kept, &mut |name, dims| {
        let (centre, spread) = distribution(name, &shape);
        Ok::<_, String>(values(name, dims, seed, centre, spread))
    })
    .expect("every name has values")
}

/// Uniform random numbers in `centre ± spread`. They depend only on the tensor's name and the seed, so that stored
/// results do not depend on the model's own initialisation.
pub(crate) fn values(name: &str, dims: &[usize], seed: u64, centre: f64, spread: f64) -> TensorData {
    // FNV-1a hash of the name.
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let mut random = ChaCha8Rng::seed_from_u64(hash ^ seed);
    let count: usize = dims.iter().product();
    let uniform = |random: &mut ChaCha8Rng| random.next_u32() as f64 / 2f64.powi(31) - 1.0;
    let values: Vec<f32> = (0..count).map(|_| (centre + spread * uniform(&mut random)) as f32).collect();
    TensorData::new(values, dims.to_vec())
}

/// (centre, spread) of a parameter's values. GEMMs keep the size of their input, norms and scales are near 1, A is in
/// ±1, and W_dt is large enough for distinct scores.
fn distribution(name: &str, shape: &ModelShape) -> (f64, f64) {
    let product = |d_in: usize| (0.0, (3.0 / d_in as f64).sqrt());
    match name {
        _ if name.ends_with("norm.weight") => (1.0, 0.5),
        _ if name.ends_with("_residual") => (1.0, 0.2),
        _ if name.ends_with(".a") => (0.0, 1.0),
        _ if name.ends_with(".sinks") => (0.5, 1.5),
        _ if name.ends_with("qkv_bias") => (0.0, 0.5),
        _ if name.ends_with("dt_proj.weight") => product(shape.kv_width()),
        _ if name.ends_with("o_proj.weight") => product(shape.q_width()),
        _ if name.ends_with("down_proj.weight") => product(shape.d_ff),
        "embed_tokens.weight" if shape.tie_word_embeddings => (0.0, 0.4),
        _ => product(shape.d_model),
    }
}

/// The JSON of a tokenizer with [`VOCAB_SIZE`] words `t0`, `t1`, …; the last one is the end-of-document token.
pub(crate) fn tokenizer_json() -> String {
    let eos = VOCAB_SIZE - 1;
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        (0..eos).map(|id| (format!("t{id}"), id.into())).collect();
    vocab.insert("<|endoftext|>".into(), eos.into());
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": eos, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    })
    .to_string()
}

/// Writes a checkpoint of `model` into `folder` and opens it.
pub(crate) fn write_checkpoint(folder: &Path, recipe: &Recipe, model: &Qwen3<Flex>) -> Checkpoint {
    let state = CheckpointState { step: 1, ..CheckpointState::untrained(VOCAB_SIZE) };
    let files = CheckpointFiles {
        model: named_parameters(model),
        optimizer: Vec::new(),
        recipe_toml: recipe.to_toml().expect("small numbers"),
        tokenizer_json: tokenizer_json(),
    };
    let path = Checkpoint::write(folder, state, &files).expect("the folder is writable");
    Checkpoint::open(&path).expect("just written")
}

/// `len` pseudo-random tokens.
pub(crate) fn tokens(len: usize, seed: u64) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| random.next_u32() % VOCAB_SIZE as u32).collect()
}

/// `len` different tokens. Equal tokens would have equal scores in the first layer, of which Sieve keeps the later
/// token, and `torch.topk` does not say which.
pub(crate) fn distinct_tokens(len: usize, seed: u64) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut all: Vec<u32> = (0..VOCAB_SIZE as u32).collect();
    for n in 0..len {
        all.swap(n, n + random.next_u32() as usize % (VOCAB_SIZE - n));
    }
    all.truncate(len);
    all
}

/// `[1, len]` token ids.
pub(crate) fn ids(tokens: &[u32]) -> Tensor<Flex, 2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), &Default::default())
}

/// The tokens that a model generates after `prompt`.
pub(crate) fn generated(model: &Qwen3<Flex>, prompt: &[u32], config: GenerateConfig) -> Vec<u32> {
    let generator = Generator::new(model, prompt, config, &Default::default()).expect("it fits");
    generator.collect::<Result<_, _>>().expect("finite")
}

/// Greedy decoding of exactly `max_new_tokens` tokens: the end-of-document id is outside the vocabulary.
pub(crate) fn greedy(max_new_tokens: usize) -> GenerateConfig {
    GenerateConfig { max_new_tokens, sampling: Sampling::GREEDY, eos_id: VOCAB_SIZE as u32, num_tokens: VOCAB_SIZE }
}

/// Options of an export into one file. Its end token is [`tokenizer_json`]'s.
pub(crate) fn export_options(dtype: ExportDtype) -> ExportOptions {
    ExportOptions {
        dtype,
        max_shard_bytes: DEFAULT_SHARD_BYTES,
        form: None,
        eos_token_id: VOCAB_SIZE as u32 - 1,
        pad_token_id: None,
    }
}

/// Largest absolute difference between two lists.
///
/// Panics if their lengths differ or a value is not finite.
pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |max, (a, b)| {
        let difference = (a - b).abs();
        assert!(difference.is_finite(), "{a} and {b}");
        f32::max(max, difference)
    })
}
