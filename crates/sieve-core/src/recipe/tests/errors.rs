//! Every rule, broken alone and together.

use super::*;
use sieve_testing::{cases, refusal, says};

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
fn unknown_names_name_section_key_neighbour_and_list_and_misplaced_keys_are_sent_home() {
    for [from, to, expected] in cases(
        r#"
        hidden_size = 48 => hiden_size = 48 => \
            line 3: model.hiden_size: [model] has no key hiden_size, did you mean hidden_size? | \
            the keys of [model] are hidden_size, intermediate_size, num_hidden_layers | \
            line 2: model.hidden_size: is missing; it must be a whole number of at least 0 | \
            r.toml is not a valid recipe: 2 mistakes\n
        lr = 1e-3 => lr = 1e-3\nwarmup_steps = 3 => warmup_steps belongs to [lr_scheduler]
        \n[model] => seq_len = 3\n[model] => \
            line 1: seq_len: a key must be in a section\n    hint: move it below [training]
        [optimizer] => [optimiser] => there is no section [optimiser], did you mean optimizer? | \
            section [optimizer] is missing\n    hint: [optimizer] must give lr
        [optimizer] => [[stages]]\nsteps = 3\n[optimizer] => there is no section [stages], did you mean stage?
        [optimizer] => [activation_checkpoint]\nmode = "ful"\n[optimizer] => there is no "ful", did you mean full?
        kind = "dma" => kind = "dmaa" => there is no "dmaa", did you mean dma?
    "#,
    ) {
        let text = message(from, to);
        says(&text, expected);
        assert!(text.starts_with("r.toml is not a valid recipe: "), "{text}");
    }
}

#[test]
fn wrong_types_name_key_value_wish_and_line() {
    for [from, to, expected] in cases(
        r#"
        steps = 40 => steps = "ten" => line 23: training.steps: wanted a whole number of at least 0, got the string \
            "ten"
        steps = 40 => steps = -4 => training.steps: wanted a whole number of at least 0, got -4
        steps = 40 => steps = 4.0 => training.steps: wanted a whole number of at least 0, got 4.0
        lr = 1e-3 => lr = "1e-3" => optimizer.lr: wanted a number, got the string "1e-3"
        = true => = 1 => model.tie_word_embeddings: wanted true or false, got 1
        ["text/*.md"] => "text/*.md" => data.paths: wanted a list of strings, like ["a", "b"], got the string \
            "text/*.md"
        ["text/*.md"] => ["a", 3] => got a list with 3
        { vocab_size = 512 } => 512 => tokenizer.train: wanted a table, like { vocab_size = …, sample_bytes = … }, \
            got 512
        { vocab_size = 512 } => { vocab_size = true } => \
            tokenizer.train.vocab_size: wanted a whole number of at least 0, got true
        { vocab_size = 512 } => { vocab_sise = 512 } => \
            [tokenizer.train] has no key vocab_sise, did you mean vocab_size?
        kind = "dma" => kind = 3 => attention.kind: wanted one of "mha", "swa", "mla", "nsa", "dma", \
            "infllm_v2", "moba", "msa", got 3
        steps = 40 => steps = 2024-01-02 => got the date 2024-01-02
    "#,
    ) {
        let text = message(from, to);
        assert!(text.contains(expected), "{to}: {text}");
    }
    let text = Recipe::load("model = 3", "r.toml", &[])
        .expect_err("no section")
        .to_string();
    says(&text, "line 1: model: wanted a section [model], got 3");
    assert_eq!(text.matches("model: ").count(), 1, "{text}");
}

#[test]
fn each_rule_is_checked() {
    for [from, to, expected] in cases(
        r#"
        num_key_value_heads = 2 => num_key_value_heads = 4 => \
            model.num_key_value_heads: is 4, which does not divide num_attention_heads = 6\n    hint: 6 heads can \
            share 1, 2, 3, 6 key-value heads
        head_dim = 10 => head_dim = 9 => model.head_dim: is 9, but rotary embedding turns pairs and needs an even \
            number\n    hint: use 8 or 10
        hidden_size = 48 => hidden_size = 0 => model.hidden_size: is 0, outside 1 to
        num_key_value_heads = 2 => num_key_value_heads = 0 => model.num_key_value_heads: is 0
        hidden_size = 48 => hidden_size = 9000000000 => model.hidden_size: is 9000000000, outside
        head_dim = 10 => head_dim = 10\nrope_theta = nan => model.rope_theta: is NaN, outside 1 to 1e12
        head_dim = 10 => head_dim = 10\nrope_theta = 0.5 => model.rope_theta: is 0.5, outside 1 to 1e12
        head_dim = 10 => head_dim = 10\nrope_theta = 1e300 => model.rope_theta: is 1e300
        head_dim = 10 => head_dim = 10\nrms_norm_eps = 0 => model.rms_norm_eps: is 0
        head_dim = 10 => head_dim = 10\nrms_norm_eps = 1e30 => model.rms_norm_eps: is 1e30, outside 1.2e-38 to 1\n    \
            hint: 1e-6 and 1e-5 are usual
        head_dim = 10 => head_dim = 10\ninitializer_range = -0.02 => model.initializer_range: is -0.02
        head_dim = 10 => head_dim = 10\ninitializer_range = 1e20 => model.initializer_range: is 1e20, outside
        head_dim = 10 => head_dim = 10\nvocab_size = 511 => \
            model.vocab_size: is 511, below tokenizer.train.vocab_size = 512
        keep_window_size = 16 => keep_window_size = 0 => attention.keep_window_size: is 0
        keep_window_size = 16 => keep_window_size = 16\na_init = inf => attention.a_init: is inf
        keep_window_size = 16 => keep_window_size = 16\na_init = -1e9 => attention.a_init: is -1e9, \
            outside -1000 to 1000
        keep_window_size = 16 => keep_window_size = 16\nsliding_window = 8 => \
            attention.sliding_window: does not go with kind = "dma"\n    hint: it belongs to kind = "swa"; besides \
            kind, "dma" takes preset, keep_window_size, bias, a_init
        kind = "dma"\nkeep_window_size = 16 => kind = "swa"\nsliding_window = 0 => attention.sliding_window: is 0
        kind = "dma" => kind = "mha" => attention.keep_window_size: does not go with kind = "mha"
        train = { vocab_size = 512 } =>  => line 16: tokenizer: needs exactly one of path, train and numbers, got none
        train = { => path = "t.json"\ntrain = { => needs exactly one of path, train and numbers, got two
        train = { vocab_size = 512 } => path = " " => tokenizer.path: is empty
        vocab_size = 512 => vocab_size = 257 => tokenizer.train.vocab_size: is 257, outside 258
        vocab_size = 512 => vocab_size = 512, sample_bytes = 0 => tokenizer.train.sample_bytes: is 0
        ["text/*.md"] => [] => data.paths: is an empty list
        ["text/*.md"] => ["a", ""] => data.paths: item 2 is empty
        paths = => max_bytes = 0\npaths = => data.max_bytes: is 0
        paths = => max_document_bytes = 0\npaths = => data.max_document_bytes: is 0
        paths = => text_column = ""\npaths = => data.text_column: is empty
        paths = => cache_dir = ""\npaths = => data.cache_dir: is empty
        paths = => validation_fraction = 1.0\npaths = => data.validation_fraction: is 1, outside (0, 1)
        paths = => validation_fraction = nan\npaths = => data.validation_fraction: is NaN
        steps = 40 => steps = 0 => training.steps: is 0
        seq_len = 64 => seq_len = 0 => training.seq_len: is 0
        seq_len = 64 => seq_len = 129 => training.seq_len: is 129, above model.max_position_embeddings = 128
        local_batch_size = 5 => local_batch_size = 5\nglobal_batch_size = 12 => \
            training.global_batch_size: is 12, not a multiple of local_batch_size = 5\n    hint: 10 and 15 are
        local_batch_size = 5 => local_batch_size = 5\nglobal_batch_size = 0 => training.global_batch_size: is 0
        local_batch_size = 5 => local_batch_size = 0 => training.local_batch_size: is 0
        seq_len = 64 => seq_len = 64\nprecision = "fp8" => \
            model.num_key_value_heads: times head_dim is 20, but eight-bit products need a multiple of 16\n    hint: \
            choose another size, or training.precision = "bf16"
        seq_len = 64 => seq_len = 64\nprecision = "fp16" => training.precision
        seq_len = 64 => seq_len = 64\nmax_norm = 0.0 => training.max_norm: is 0
        seq_len = 64 => seq_len = 64\nmax_norm = 1e-50 => training.max_norm: is 1e-50, outside
        lr = 1e-3 => lr = nan => optimizer.lr: is NaN, outside 0 to 3.4e38
        lr = 1e-3 => lr = 1e308 => optimizer.lr: is 1e308, outside
        lr = 1e-3 => lr = -1e-3 => optimizer.lr: is -0.001
        lr = 1e-3 => lr = 1e-3\nbeta1 = 1.0 => optimizer.beta1: is 1, outside [0, 1)
        lr = 1e-3 => lr = 1e-3\nbeta2 = -0.1 => optimizer.beta2: is -0.1
        lr = 1e-3 => lr = 1e-3\neps = 0.0 => optimizer.eps: is 0
        lr = 1e-3 => lr = 1e-3\neps = 1e-50 => optimizer.eps: is 1e-50, outside 1.2e-38 to 1\n    hint: 1e-8 is usual; \
            the optimizer counts in f32
        lr = 1e-3 => lr = 1e-3\nweight_decay = inf => optimizer.weight_decay: is inf
        lr = 1e-3 => lr = 1e-3\nweight_decay = 1e9 => optimizer.weight_decay: is 1e9, outside 0 to 100
        lr = 1e-3 => lr = 1e-3\nname = "Adam" => optimizer.name: there is no "Adam", did you mean AdamW?
        steps = 40 => steps = 4 => lr_scheduler.warmup_steps: is 7, more than training.steps = 4\n    hint: set \
            lr_scheduler.warmup_steps to 1 or less; to try the first steps alone: sieve train --stop-after 4
        warmup_steps = 7 => warmup_steps = 41 => \
            lr_scheduler.warmup_steps: is 41, more than training.steps = 40\n    hint: set lr_scheduler.warmup_steps \
            to 8 or less; to try the first steps alone: sieve train --stop-after 40
        decay_ratio = 0.2 => decay_ratio = 1.01 => lr_scheduler.decay_ratio: is 1.01, outside [0, 1]
        decay_ratio = 0.2 => decay_ratio = nan => lr_scheduler.decay_ratio: is NaN
        decay_ratio = 0.2 => decay_ratio = 0.2\nmin_lr_factor = -0.1 => lr_scheduler.min_lr_factor: is -0.1
        [optimizer] => [checkpoint]\ninterval = 0\n[optimizer] => checkpoint.interval: is 0
        [optimizer] => [checkpoint]\nfolder = "../x"\n[optimizer] => checkpoint.folder: is "../x", not a folder below
        [optimizer] => [checkpoint]\nfolder = "/x"\n[optimizer] => checkpoint.folder: is "/x"
        [optimizer] => [checkpoint]\nfolder = ""\n[optimizer] => checkpoint.folder: is ""
        [optimizer] => [metrics]\nlog_freq = 0\n[optimizer] => metrics.log_freq: is 0
        [optimizer] => [validation]\ninterval = 0\n[optimizer] => validation.interval: is 0
        [optimizer] => [validation]\ntokens = 0\n[optimizer] => validation.tokens: is 0
        [optimizer] => [validation]\npaths = []\n[optimizer] => validation.paths: is an empty list
        [optimizer] => [generation]\nprompts = ["a"]\nmax_new_tokens = 0\n[optimizer] => \
            generation.max_new_tokens: is 0, but there are prompts
    "#,
    ) {
        let error = load_replaced(from, to).expect_err(to);
        let text = error.to_string();
        assert!(text.contains(expected), "{to}: {text}");
        assert_eq!(mistakes(&error).len(), 1, "one broken rule, one mistake: {text}");
        assert!(mistakes(&error)[0].location.is_some(), "{text}");
    }
}

#[test]
fn the_tokens_of_a_process_suit_eight_bit_floats_in_every_stage() {
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
    for (text, expected) in [
        (stages(48), None),
        (stages(24), Some("stage.2.local_batch_size: times seq_len is 120, but")),
        (parts(4), None),
        (
            parts(8),
            Some("training.local_batch_size: times seq_len / context_parallel_degree is 40, but"),
        ),
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
fn some_block_is_left_for_eight_bit_floats() {
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
fn edges_of_the_rules_are_allowed() {
    for [from, to] in cases(
        r#"
        warmup_steps = 7 => warmup_steps = 40
        decay_ratio = 0.2 => decay_ratio = 1.0
        decay_ratio = 0.2 => decay_ratio = 0
        seq_len = 64 => seq_len = 128
        head_dim = 10 => head_dim = 2
        lr = 1e-3 => lr = 0
        keep_window_size = 16 => keep_window_size = 1000
        vocab_size = 512 => vocab_size = 258
        paths = => validation_fraction = 1e-9\npaths =
        head_dim = 10 => head_dim = 10\nvocab_size = 512
        train = { vocab_size = 512 } => path = "~/tokenizer.json"
    "#,
    ) {
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
    assert!(matches!(
        recipe.diff(&minimal()),
        Err(RecipeError::NotRepresentable { .. })
    ));
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
        assert!(
            error
                .to_string()
                .starts_with("bad.toml is not valid TOML\nTOML parse error at line "),
            "{error}"
        );
    }
}

/// The minimal recipe's `[attention]`.
const DMA: &str = "kind = \"dma\"\nkeep_window_size = 16";

/// The minimal recipe with another `[attention]`.
fn attention_message(lines: &str) -> String {
    message(DMA, lines)
}

const NSA: &str = "kind = \"nsa\"\ncompress_block_size = 8\ncompress_stride = 4\ncompress_hidden_size = 6\n\
                   select_block_size = 8\nnum_selected_blocks = 4\nwindow_size = 16";

#[test]
fn rules_of_chosen_blocks() {
    for [text, expected] in cases(
        r#"
        kind = "infllm_v2"\nnum_selected_blocks = 0 => attention.num_selected_blocks: is 0, outside 1 to 64
        kind = "infllm_v2"\nnum_selected_blocks = 65 => attention.num_selected_blocks: is 65, outside 1 to 64
        kind = "infllm_v2"\nnum_selected_blocks = 4\nnum_local_blocks = 4 => \
            attention.num_local_blocks: is 4, and with the document's first block more than num_selected_blocks = 4\n
        kind = "infllm_v2"\ncompress_stride = 16\nselect_block_size = 24 => \
            attention.select_block_size: is 24, not a multiple of compress_stride = 16\n    hint: 32 is
        kind = "moba"\nselect_block_size = 100 => \
            attention.select_block_size: is 100, more than 64 and no multiple of it\n    hint: 64 is
        kind = "msa"\nselect_block_size = 100 => \
            attention.select_block_size: is 100, more than 64 and no multiple of it\n    hint: 64 is
        kind = "msa"\nnum_selected_blocks = 0 => attention.num_selected_blocks: is 0, outside 1 to 64
        kind = "msa"\nindex_loss_weight = -1.0 => attention.index_loss_weight: is -1
        kind = "msa"\nindex_warmup = true => attention.index_warmup: is true to the end of the run, in which no query \
            would choose its keys\n    hint
        kind = "moba"\nnum_selected_blocks = 65 => attention.num_selected_blocks: is 65, outside 1 to 64
    "#,
    ) {
        says(&attention_message(text), expected);
    }
    for text in [
        "kind = \"infllm_v2\"\nnum_selected_blocks = 2\nnum_local_blocks = 1",
        "kind = \"moba\"\nselect_block_size = 128\nnum_selected_blocks = 1",
    ] {
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
    for [text, expected] in cases(
        r#"
        DMA\nlocal_window_size = 17 => \
            attention.local_window_size: is 17, more than keep_window_size = 16\n    hint: 16 keeps the last 16
        DMA\nrecency = "slope"\nbias = "exp" => attention.bias: is "exp", but recency = "slope" adds to the logit \
            itself\n    hint: set attention.bias = "linear"
        DMA\nlongest_period = 8 => attention.longest_period: needs recency = "slope"
        SLOPE\nshortest_period = 0 => attention.shortest_period: is 0, outside 1 to 1e9
        SLOPE\nshortest_period = 100\nlongest_period = 10 => \
            attention.longest_period: makes periods of 100 tokens for the first KV head and 10 for the last
        SLOPE\nshortest_period = 65 => \
            attention.shortest_period: makes periods of 65 tokens for the first KV head and 64 for the last
        SLOPE\nlongest_period = 63.5 => \
            attention.longest_period: makes periods of 64 tokens for the first KV head and 63.5 for the last
        DMA\nrecency = "slopes" => did you mean
    "#,
    ) {
        let text = text.replace("DMA", DMA).replace("SLOPE", &slope);
        says(&attention_message(&text), expected);
    }
}

#[test]
fn rules_of_mla_and_nsa() {
    assert!(load_replaced(DMA, NSA).is_ok());
    for [from, to, expected] in cases(
        r#"
        compress_block_size = 8 => compress_block_size = 10 => \
            attention.compress_block_size: is 10, not a multiple of compress_stride = 4\n    hint: 12 is
        select_block_size = 8 => select_block_size = 2 => \
            attention.select_block_size: is 2, not a multiple of compress_stride = 4\n    hint: 4 is
        compress_stride = 4 => compress_stride = 0 => attention.compress_stride: is 0, outside 1 to
        num_selected_blocks = 4 => num_selected_blocks = 2 => attention.num_selected_blocks: is 2, outside 3 to
        compress_hidden_size = 6 => compress_hidden_size = 6\ncompress = "mean" => \
            attention.compress_hidden_size: does not go with compress = "mean"
        window_size = 16 => windows_size = 16 => [attention] has no key windows_size, did you mean window_size?
    "#,
    ) {
        let text = attention_message(&NSA.replacen(from, to, 1));
        assert!(text.contains(expected), "{to}: {text}");
    }
    let text = attention_message("kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 3");
    says(
        &text,
        "qk_rope_head_dim: is 3, but rotary embedding turns pairs\n    hint: use 4",
    );
    says(
        &text,
        "num_key_value_heads: is 2, but kind = \"mla\" has keys and values for each of its 6 heads",
    );
}

#[test]
fn rules_of_norms_biases_and_scaled_rotation() {
    let with = |line: &str| load_replaced("hidden_size = 48", &format!("hidden_size = 48\n{line}"));
    let recipe = with("qk_norm = false\nrope_scaling = { rope_type = \"yarn\", factor = 4, beta_fast = 16 }");
    let shape = recipe.expect("a model").model_shape(512).expect("it fits");
    assert!(!shape.qk_norm && !shape.qkv_bias);
    // Pairs that turn more than 16 times in the row stay, those that turn less than once are divided by 4.
    let (frequencies, amplitude) = shape.rotary_frequencies(48);
    assert_eq!(frequencies[0], 1.0);
    let slowest = shape.rope_theta.powf(-46.0 / 48.0);
    assert!((frequencies[23] / slowest - 0.25).abs() < 1e-12);
    assert!((amplitude - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    for [line, wanted] in cases(
        r#"
        rope_scaling = { factor = 2.0 } => rope_type: is missing
        rope_scaling = { rope_type = "linear" } => factor: is missing
        rope_scaling = { rope_type = "linear", factor = 0.5 } => model.rope_scaling.factor: is 0.5, outside 1 to
        rope_scaling = { rope_type = "linear", factor = 2.0, beta_fast = 3.0 } => has beta_fast, which its rope_type
        rope_scaling = { rope_type = "dynamic", factor = 2.0 } => there is no "dynamic"
        rope_scaling = { rope_type = "llama3", factor = 8.0, low_freq_factor = 4.0 } => from 4 to 4 turns
    "#,
    ) {
        refusal(with(line), wanted);
    }
    for (other, wanted) in [
        ("parallelism.context_parallel_degree=2", "needs whole rows"),
        ("attention.kind=mla", "model.qkv_bias: does not go with kind = \"mla\""),
    ] {
        let sets = ["model.qkv_bias=true", other].map(str::to_owned);
        refusal(Recipe::load(MINIMAL, "r.toml", &sets), wanted);
    }
}

#[test]
fn mixtures_and_synthetic_data_are_checked() {
    const MQAR: &str = "format = \"mqar\"\nmqar \
        = { vocab_size = 512, seq_lens = [64, 32], num_pairs = [4, 8], num_samples = [10, 5] }";
    let load = |data: &str, tokenizer: &str| {
        let text =
            MINIMAL
                .replacen("paths = [\"text/*.md\"]", data, 1)
                .replacen("train = { vocab_size = 512 }", tokenizer, 1);
        Recipe::load(&text, "r.toml", &[])
    };
    let recipe = load(MQAR, "numbers = 512").expect("a synthetic task");
    let mqar = recipe.data.mqar.expect("its section");
    assert_eq!((mqar.num_test_samples, mqar.power, mqar.seed), (1000, 0.01, 0));
    assert_eq!((mqar.seq_lens, mqar.noise), (vec![64, 32], MqarNoise::Zeros));
    let recipe = load("paths = [\"a\", \"b\"]\nweights = [3, 0.5]", "numbers = 9").expect("a mixture");
    assert_eq!(recipe.data.weights, Some(vec![3.0, 0.5]));
    for [from, to, wanted] in cases(
        r#"
        = 512 => = 64 => data.mqar.vocab_size: is 64
        [64, 32] => [66, 32] => does not fit rows of training.seq_len = 64
        [64, 32] => [64, 31] => holds 31, which is odd
        [4, 8] => [4, 9] => samples of 32 tokens have room for 1 to 8
        seq_lens => vocab_sizes = [512], seq_lens => data.mqar.vocab_sizes: has 1 entries, seq_lens 2
        seq_lens => vocab_sizes = [512, 32], seq_lens => data.mqar.vocab_sizes: holds 32 for samples of 32 tokens
        seq_lens => vocab_sizes = [514, 64], seq_lens => up to vocab_size = 512
        [4, 8] => [4] => num_pairs 1
        [10, 5] => [10, 0] => data.mqar.num_samples: is 0
        [4, 8] => [4, -8] => wanted a list of whole numbers
        "mqar" => "text" => but the format is another
        seq_lens => lengths => [data.mqar] has no key lengths
    "#,
    ) {
        assert!(MQAR.contains(from), "{from}");
        refusal(load(&MQAR.replace(from, to), "numbers = 512"), wanted);
    }
    for [data, tokenizer, wanted] in cases(
        r#"
         => numbers = 9 => data.paths: is an empty list
        format = "mqar" => numbers = 9 => data.mqar: is missing
        MQAR => train = { vocab_size = 512 } => tokenizer.numbers: is missing or too small
        MQAR => numbers = 511 => tokenizer.numbers: is missing or too small
        MQAR\npaths = ["a"] => numbers = 512 => reads no files
        paths = ["a"]\nweights = [1, 2] => numbers = 9 => has 2 entries, data.paths has 1
        paths = ["a"]\nweights = [0] => numbers = 9 => item 1 is 0, not a positive number
        paths = ["a"]\nweights = ["x"] => numbers = 9 => wanted a list of numbers
        paths = ["a"]\nformat = "csv" => numbers = 9 => there is no "csv"
    "#,
    ) {
        refusal(load(&data.replace("MQAR", MQAR), tokenizer), wanted);
    }
}
