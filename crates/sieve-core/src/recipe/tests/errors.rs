//! Every rule, broken alone and together.

use super::*;
use crate::model::ModelShape;
use sieve_testing::{refusal, says};

/// The error of the minimal recipe with `from` replaced by `to`.
fn message(from: &str, to: &str) -> String {
    load_replaced(from, to).expect_err(to).to_string()
}

fn mistakes(error: &RecipeError) -> &[Mistake] {
    match error {
        RecipeError::Invalid { mistakes, .. } => mistakes,
        other => panic!("{other}"),
    }
}

/// The keys of all mistakes, in their order.
fn keys(error: &RecipeError) -> String {
    let keys = mistakes(error).iter().map(|mistake| mistake.key.as_str());
    keys.collect::<Vec<_>>().join(" ")
}

#[test]
fn errors_of_unknown_names_list_the_known_ones_and_say_where_a_misplaced_key_belongs() {
    for [from, to, expected] in rows("unknown names") {
        let text = message(from, to);
        says(&text, expected);
        assert!(text.starts_with("r.toml is not a valid recipe: "), "{text}");
    }
}

#[test]
fn errors_of_wrong_types_have_key_value_expected_type_and_line() {
    for [from, to, expected] in rows("wrong types") {
        let text = message(from, to);
        assert!(text.contains(expected), "{to}: {text}");
    }
    let text = Recipe::load("model = 3", "r.toml", &[]).expect_err("no section").to_string();
    says(&text, "line 1: model: expected a section [model], got 3");
    assert_eq!(text.matches("model: ").count(), 1, "{text}");
}

#[test]
fn each_rule_is_checked() {
    for [from, to, expected] in rows("each rule") {
        let error = load_replaced(from, to).expect_err(to);
        let text = error.to_string();
        assert!(text.contains(expected), "{to}: {text}");
        assert_eq!(mistakes(&error).len(), 1, "one broken rule, one mistake: {text}");
        assert!(mistakes(&error)[0].location.is_some(), "{text}");
    }
}

#[test]
fn the_tokens_of_a_process_fit_fp8_gemms_in_every_stage() {
    let text = MINIMAL.replace("head_dim = 10", "head_dim = 16");
    let text = text.replace("seq_len = 64", "seq_len = 64\nprecision = \"fp8\"");
    let stages = |seq_len: usize| {
        let stages = format!("[[stage]]\nsteps = 20\n[[stage]]\nsteps = 20\nseq_len = {seq_len}\n[optimizer]");
        text.replace("[optimizer]", &stages)
    };
    let parts = |degree: usize| {
        let part = format!("[parallelism]\ncontext_parallel_degree = {degree}\n[optimizer]");
        text.replace("[optimizer]", &part)
    };
    // A process has 5 rows, and an fp8 GEMM takes a multiple of 16 tokens: 240 and 80 fit, 120 and 40 do not.
    for (text, expected) in [
        (stages(48), None),
        (stages(24), Some("stage.2.local_batch_size: times seq_len is 120, but")),
        (parts(4), None),
        (parts(8), Some("training.local_batch_size: times seq_len / context_parallel_degree is 40, but")),
    ] {
        let error = Recipe::load(&text, "r.toml", &[]).err().map(|error| error.to_string());
        let is_expected = match expected {
            Some(words) => error.as_ref().is_some_and(|error| error.contains(words)),
            None => error.is_none(),
        };
        assert!(is_expected, "{expected:?}: {error:?}");
    }
}

#[test]
fn bf16_end_blocks_leave_at_least_one_block_in_fp8() {
    let text = MINIMAL.replace("head_dim = 10", "head_dim = 16");
    let of = |blocks| {
        let fp8 = format!("seq_len = 64\nprecision = \"fp8\"\nbf16_end_blocks = {blocks}");
        Recipe::load(&text.replace("seq_len = 64", &fp8), "r.toml", &[])
    };
    assert!(of(1).is_ok());
    for blocks in [2, 99] {
        let text = of(blocks).expect_err("none of three is left").to_string();
        let expected = format!(
            "training.bf16_end_blocks: is {blocks} at each end of 3 blocks, which leaves none in fp8\n    \
             hint: set it to 1 or less"
        );
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn values_at_the_limits_of_the_rules_are_allowed() {
    for [from, to] in rows("edges") {
        assert!(load_replaced(from, to).is_ok(), "{to}");
    }
}

#[test]
fn every_mistake_is_reported_at_once_in_the_order_of_the_text() {
    let text = MINIMAL
        .replace("num_key_value_heads = 2", "num_key_value_heads = 5")
        .replace("head_dim = 10", "head_dim = 7")
        .replace("paths =", "path =")
        .replace("steps = 40", "steps = \"many\"")
        .replace("lr = 1e-3", "lr = -1.0")
        .replace("decay_ratio = 0.2", "decay_ratio = 2.0");
    let error = Recipe::load(&text, "r.toml", &["training.seq_len=x".to_owned()]).expect_err("seven mistakes and more");
    let wanted = "model.num_key_value_heads model.head_dim data.paths data.path training.steps optimizer.lr \
        lr_scheduler.decay_ratio training.seq_len";
    assert_eq!(keys(&error), wanted, "{error}");
}

#[test]
fn validate_reports_the_rules_for_a_recipe_changed_in_code() {
    let mut recipe = minimal();
    assert_eq!(recipe.validate(), Ok(()));
    recipe.model.head_dim = 3;
    recipe.training.seed = u64::MAX;
    recipe.optimizer.lr = f64::NAN;
    let error = recipe.validate().expect_err("three broken rules");
    assert_eq!(keys(&error), "model.head_dim training.seed optimizer.lr");
    assert!(matches!(recipe.to_toml(), Err(RecipeError::NotRepresentable { .. })));
    assert!(matches!(recipe.diff(&minimal()), Err(RecipeError::NotRepresentable { .. })));
}

#[test]
fn text_that_is_not_toml_says_where() {
    for text in [
        "[model",
        "a = ",
        "x = 1\nx = 2",
        "\u{0}",
        "a = \"",
        "[model]\n[model]",
        &"[".repeat(100_000),
        &format!("a = {}", "[".repeat(100_000)),
    ] {
        let error = Recipe::load(text, "bad.toml", &[]).expect_err("not TOML");
        assert!(matches!(error, RecipeError::Syntax { .. }), "{error}");
        assert!(error.to_string().starts_with("bad.toml is not valid TOML\nTOML parse error at line "), "{error}");
    }
}

/// The error of the minimal recipe with these lines in `[attention]`.
fn attention_message(lines: &str) -> String {
    message(DMA, lines)
}

const NSA: &str = "kind = \"nsa\"\ncompress_block_size = 8\ncompress_stride = 4\ncompress_hidden_size = 6\n\
                   select_block_size = 8\nnum_selected_blocks = 4\nwindow_size = 16";

#[test]
fn rules_of_chosen_blocks() {
    for [text, expected] in rows("chosen blocks") {
        says(&attention_message(text), expected);
    }
    for [text] in rows("chosen blocks that may be") {
        assert!(load_replaced(DMA, text).is_ok(), "{text}");
    }
}

#[test]
fn rules_of_bands() {
    for [text, expected] in rows("bands of keys") {
        says(&attention_message(text), expected);
    }
    for [text] in rows("bands of keys that may be") {
        assert!(load_replaced(DMA, text).is_ok(), "{text}");
    }
}

#[test]
fn rules_of_the_general_form_of_dma() {
    let slope = format!("{DMA}\nbias = \"linear\"\nrecency = \"slope\"");
    for rest in [
        "",
        "\nshortest_period = 4\nlongest_period = 64.5",
        "\nshortest_period = 64\nlongest_period = 64",
        "\nlocal_window_size = 16",
    ] {
        assert!(load_replaced(DMA, &format!("{slope}{rest}")).is_ok(), "{rest}");
    }
    for [text, expected] in rows("general form of dma") {
        let text = text.replace("DMA", DMA).replace("SLOPE", &slope);
        says(&attention_message(&text), expected);
    }
}

#[test]
fn rules_of_mla_and_nsa() {
    assert!(load_replaced(DMA, NSA).is_ok());
    for [from, to, expected] in rows("nsa") {
        let text = attention_message(&NSA.replacen(from, to, 1));
        assert!(text.contains(expected), "{to}: {text}");
    }
    let text = attention_message("kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 3");
    says(&text, "qk_rope_head_dim: is 3, but rotary embedding turns pairs\n    hint: use 4");
    says(&text, "num_key_value_heads: is 2, but kind = \"mla\" has keys and values for each of its 6 heads");
}

#[test]
fn rules_of_norms_biases_and_scaled_rotation() {
    let with = |line: &str| load_replaced("hidden_size = 48", &format!("hidden_size = 48\n{line}"));
    let recipe = with("qk_norm = false\nrope_scaling = { rope_type = \"yarn\", factor = 4, beta_fast = 16 }");
    let shape = recipe.expect("a model").model_shape(512).expect("it fits");
    assert!(!shape.qk_norm && !shape.qkv_bias);
    // Pairs that turn more than 16 times in the row stay, pairs that turn less than once are divided by 4.
    let (frequencies, amplitude) = shape.rotary_frequencies(48);
    assert_eq!(frequencies[0], 1.0);
    let slowest = shape.rope_theta.powf(-46.0 / 48.0);
    assert!((frequencies[23] / slowest - 0.25).abs() < 1e-12);
    assert!((amplitude - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    for [line, wanted] in rows("norms and rotation") {
        refusal(with(line), wanted);
    }
    for (other, wanted) in [
        ("parallelism.context_parallel_degree=2", "needs whole rows"),
        ("attention.kind=mla", "model.qkv_bias: does not go with kind = \"mla\""),
    ] {
        refusal(load_with(MINIMAL, &["model.qkv_bias=true", other]), wanted);
    }
}

#[test]
fn only_dense_and_window_layers_take_sinks() {
    const SINKS: &str = "model.attention_sinks=true";
    for kind in AttentionKind::ALL {
        let loaded = load_with(&with_attention(&format!("kind = {:?}", kind.name())), &[SINKS]);
        match kind {
            AttentionKind::Mha | AttentionKind::Swa => {
                let shape = loaded.expect("a kind with sinks").model_shape(512).expect("it fits");
                let sinks = shape.all_parameters().into_iter().filter(|spec| spec.ours.ends_with("self_attn.sinks"));
                assert!(sinks.map(|spec| spec.dims).eq(vec![vec![shape.num_heads]; shape.num_layers]));
                let without = ModelShape { attention_sinks: false, ..shape.clone() };
                assert_eq!(shape.executed_flops_per_token(64), without.executed_flops_per_token(64));
            }
            _ => {
                let wanted = format!("model.attention_sinks: is true, and attention of kind = \"{}\"", kind.name());
                refusal(loaded, &wanted);
            }
        }
    }
    refusal(load_with(MINIMAL, &[SINKS, "parallelism.context_parallel_degree=2"]), "needs whole rows");
}

#[test]
fn mixtures_and_synthetic_data_are_checked() {
    const MQAR: &str = "format = \"mqar\"\nmqar \
        = { vocab_size = 512, seq_lens = [64, 32], num_pairs = [4, 8], num_samples = [10, 5] }";
    let load = |data: &str, tokenizer: &str| {
        let text =
            MINIMAL.replacen("paths = [\"text/*.md\"]", data, 1).replacen("train = { vocab_size = 512 }", tokenizer, 1);
        Recipe::load(&text, "r.toml", &[])
    };
    let recipe = load(MQAR, "numbers = 512").expect("a synthetic task");
    let mqar = recipe.data.mqar.expect("its section");
    assert_eq!((mqar.num_test_samples, mqar.power, mqar.seed), (1000, 0.01, 0));
    assert_eq!((mqar.seq_lens, mqar.noise), (vec![64, 32], MqarNoise::Zeros));
    let recipe = load("paths = [\"a\", \"b\"]\nweights = [3, 0.5]", "numbers = 9").expect("a mixture");
    assert_eq!(recipe.data.weights, Some(vec![3.0, 0.5]));
    for [from, to, wanted] in rows("synthetic data") {
        assert!(MQAR.contains(from), "{from}");
        refusal(load(&MQAR.replace(from, to), "numbers = 512"), wanted);
    }
    for [data, tokenizer, wanted] in rows("sources of data") {
        refusal(load(&data.replace("MQAR", MQAR), tokenizer), wanted);
    }
}
