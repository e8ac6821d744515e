//! `[[stage]]`: defaults, order, rules, overrides.

use super::*;
use crate::model::{Attention, DmaShape};
use sieve_testing::refusal;

/// The minimal recipe with two stages instead of `steps = 40`.
const STAGED: &str = "local_batch_size = 5\n\
    [[stage]]\nsteps = 30\n\
    [[stage]]\ntokens = 1281\nseq_len = 128\nrope_theta = 5e4\nwindow = 32\nlocal_batch_size = 1\nglobal_batch_size = \
    2\n";

fn staged() -> Recipe {
    load(STAGED, &[]).unwrap_or_else(|error| panic!("{error}"))
}

/// The minimal recipe with `stages` in place of its steps and its local batch size.
fn load(stages: &str, overrides: &[&str]) -> Result<Recipe, RecipeError> {
    let text = MINIMAL.replacen("steps = 40\n", "", 1);
    let text = text.replacen("local_batch_size = 5", stages, 1);
    load_with(&text, overrides)
}

#[test]
fn what_a_stage_leaves_out_comes_from_the_sections() {
    let recipe = staged();
    assert_eq!(
        recipe.stage[0],
        StageSection {
            steps: 30,
            seq_len: 64,
            rope_theta: 10_000.0,
            window: Some(16),
            index_warmup: None,
            kind: None,
            layer_types: None,
            windows: None,
            drop: false,
            paths: None,
            weights: None,
            local_batch_size: 5,
            global_batch_size: 5,
        }
    );
    // 1281 tokens at 2 x 128 a step: 5 steps and a token, rounded up.
    assert_eq!(recipe.stage[1].steps, 6);
    assert_eq!(recipe.training.steps, 36);
    assert_eq!(recipe.num_tokens(), 30 * 5 * 64 + 6 * 2 * 128);
    let text = recipe.to_toml().expect("TOML");
    assert_eq!(Recipe::load(&text, "again", &[]).as_ref(), Ok(&recipe));
    // In a text to edit, what follows from other values is commented out, so that those can be changed alone.
    let text = recipe.to_template().expect("writable");
    assert_eq!(Recipe::load(&text, "again", &[]).as_ref(), Ok(&recipe));
    let changed = ["stage.1.steps=20".to_owned(), "training.seq_len=32".to_owned()];
    let changed = Recipe::load(&text, "again", &changed).expect("other steps and rows");
    assert_eq!((changed.training.steps, changed.stage[0].seq_len, changed.stage[1].seq_len), (26, 32, 128));
}

/// The minimal recipe as msa with windows in one layer of three, and a stage of other layers.
fn changing(stage: &str, overrides: &[&str]) -> Result<Recipe, RecipeError> {
    let attention = "kind = \"msa\"\nselect_block_size = 8\n[attention.near]\nkind = \"swa\"\nsliding_window = 9\n";
    let text = MINIMAL.replacen("steps = 40\n", "", 1).replacen(DMA, attention, 1);
    let text = text.replacen("[attention]", "layer_types = [\"near\", \"2 sparse\"]\n[attention]", 1);
    let stages = format!("local_batch_size = 5\n[[stage]]\nsteps = 30\n[[stage]]\nsteps = 10\n{stage}\n");
    load_with(&text.replacen("local_batch_size = 5", &stages, 1), overrides)
}

#[test]
fn a_stage_has_layers_of_its_own() {
    let kinds = |recipe: &Recipe, stage: usize| {
        let shape = recipe.at_stage(&recipe.stages()[stage]).model_shape(512).expect("large enough");
        [0, 1, 2].map(|layer| shape.attention_of(layer))
    };
    let load = |stage: &str| changing(stage, &[]).unwrap_or_else(|error| panic!("{error}"));
    let dense_end = load("kind = \"mha\"\ndrop = true");
    let [near, msa, _] = kinds(&dense_end, 0);
    assert_eq!((near, msa.kind().name()), (Attention::swa(9), "msa"));
    assert_eq!(kinds(&dense_end, 1), [near, Attention::DENSE, Attention::DENSE]);
    // The recipe of the stage alone is valid too.
    let alone = dense_end.at_stage(&dense_end.stages()[1]);
    assert_eq!(alone.validate().map_err(|error| error.to_string()), Ok(()));
    for written in [dense_end.to_toml().expect("TOML"), dense_end.to_template().expect("writable")] {
        assert_eq!(Recipe::load(&written, "again", &[]).as_ref(), Ok(&dense_end), "{written}");
    }
    let all_near = load("kind = \"near\"\ndrop = true\nwindow = 21");
    assert_eq!(kinds(&all_near, 1), [Attention::swa(9), Attention::swa(21), Attention::swa(21)]);
    // Without a window of its own the stage has the table's.
    assert_eq!(load("kind = \"near\"\ndrop = true").stage[1].window, Some(9));
    let wider = load("windows = { near = 12 }");
    assert_eq!(kinds(&wider, 1), [Attention::swa(12), msa, msa]);
    let set = changing("", &["stage.2.windows.near=12"]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(kinds(&set, 1), kinds(&wider, 1));
    let moved = load("layer_types = [\"sparse\", \"2 near\"]\ndrop = true");
    assert_eq!(kinds(&moved, 1), [msa, near, near]);
    // A stage that only gains tensors needs no `drop`.
    let gains = load("layer_types = [\"sparse\"]");
    assert_eq!(kinds(&gains, 1), [msa; 3]);
}

#[test]
fn a_stage_whose_model_the_one_before_cannot_become_is_refused() {
    let refused = |stage: &str, words: &str| refusal(changing(stage, &[]), words);
    refused(
        "kind = \"mha\"",
        "stage.2.kind: would lose trained tensors | self_attn.indexer.proj.weight in 2 layers | \
         give stage 2 drop = true",
    );
    refused(
        "layer_types = [\"near\", \"near\", \"sparse\"]",
        "stage.2.layer_types: would lose trained tensors | self_attn.indexer.proj.weight in 1 layer",
    );
    refused("kind = \"nsa\"", "stage.2.kind: is \"nsa\", and there is no table [attention.nsa]");
    refused("kind = \"shared\"", "stage.2.kind: is \"shared\", which is not a kind");
    refused("kind = \"mlaa\"", "stage.2.kind: is \"mlaa\", which names no layer");
    refused("layer_types = [\"near\"]", "stage.2.layer_types: contains no layer of the kind of [attention]");
    refused("layer_types = [\"sparse\", \"near\"]", "stage.2.layer_types: has 2 entries, which do not divide");
    refused("windows = { far = 12 }", "stage.2.windows: names \"far\", and there is no table [attention.far]");
    refused("windows = { near = 0 }", "stage.2.windows: expected a table of whole numbers");
    refused("windows = 3", "stage.2.windows: expected a table of whole numbers");
    refused("kind = \"mha\"\ndrop = true\nwindow = 8", "stage.2.window: does not go with kind = \"mha\"");
    // An override to latent attention leaves out what it shares no weights with.
    let latent = changing("kind = \"mha\"\ndrop = true", &["attention.kind=mla"]);
    assert_eq!(latent.unwrap_or_else(|error| panic!("{error}")).stage[1].kind, None);
}

#[test]
fn the_tokens_of_the_largest_run_do_not_overflow() {
    let mut recipe = minimal();
    let training = &mut recipe.training;
    (training.steps, training.global_batch_size, training.seq_len) = (1 << 40, 1 << 24, 1 << 27);
    assert_eq!(recipe.num_tokens(), u64::MAX);
}

#[test]
fn steps_and_states_find_their_stage() {
    let recipe = staged();
    let index = |step| recipe.stage_of_step(step).index;
    assert_eq!([0, 29, 30, 35, 99].map(index), [0, 0, 1, 1, 1]);
    let index = |done| recipe.stage_of_state(done).index;
    assert_eq!([0, 1, 30, 31, 36].map(index), [0, 0, 0, 1, 1]);

    let second = recipe.at_stage(&recipe.stage_of_step(30));
    assert_eq!(second.validate(), Ok(()));
    assert_eq!(second.training.seq_len, 128);
    assert_eq!(second.training.tokens_per_step(), 256);
    assert_eq!(second.training.steps, 36);
    let shape = second.model_shape(512).expect("fits");
    assert_eq!(shape.rope_theta, 5e4);
    let Attention::Dma(DmaShape { keep_window_size, .. }) = shape.attention else { panic!("not DMA") };
    assert_eq!(keep_window_size, 32);
    let single = minimal();
    assert_eq!(single.at_stage(&single.stage_of_step(3)), single);
    assert_eq!(single.stages().len(), 1);
}

#[test]
fn mistakes_in_stages_name_the_stage_and_the_line() {
    for [from, to, expected] in rows("stages") {
        assert!(STAGED.contains(from), "{from}");
        refusal(load(&STAGED.replacen(from, to, 1), &[]), expected);
    }
    refusal(
        load_replaced("[optimizer]", "[stage]\nsteps = 3\n[optimizer]"),
        "stage: expected one or more blocks [[stage]], got a table",
    );
    refusal(
        load_replaced(DMA, "kind = \"mha\"\n[[stage]]\nsteps = 40\nwindow = 8"),
        "stage.1.window: does not go with kind = \"mha\"",
    );
    // An override to another kind leaves out the stages' windows; "swa" has its default, a quarter of 64 tokens.
    for (kind, windows) in [("mha", [None; 2]), ("swa", [Some(16); 2])] {
        let recipe = load(STAGED, &[&format!("attention.kind={kind}")]).expect("one key");
        assert_eq!([0, 1].map(|stage| recipe.stage[stage].window), windows, "{kind}");
    }
}

#[test]
fn an_indexer_warms_up_in_stages_before_the_last() {
    let load = |text: &str| load(text, &["attention.kind=msa", "attention.select_block_size=8"]);
    let warmup = |recipe: &Recipe| -> Vec<_> {
        let stages = recipe.stages().into_iter();
        stages.map(|stage| recipe.at_stage(&stage).attention.index_warmup()).collect()
    };
    let plain = STAGED.replacen("window = 32\n", "", 1);
    let recipe = load(&plain).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(warmup(&recipe), [Some(false); 2]);
    let recipe = load(&plain.replacen("steps = 30", "steps = 30\nindex_warmup = true", 1)).expect("valid");
    assert_eq!(warmup(&recipe), [Some(true), Some(false)]);
    assert_eq!(recipe.attention.index_warmup(), Some(false));
    // Meanwhile every key is read.
    let keys = [0, 1].map(|stage| {
        let attention = recipe.at_stage(&recipe.stages()[stage]).attention.own;
        crate::model::mean_active_keys(attention, 1024)
    });
    assert!(keys[0] == 512.5 && keys[1] < 200.0, "{keys:?}");
    // An override to another kind leaves out the text's warm-up.
    let warm = plain.replacen("steps = 30", "steps = 30\nindex_warmup = true", 1);
    let warm = warm.replacen("local_batch_size = 5", "local_batch_size = 5\n", 1);
    let text =
        with_attention("kind = \"msa\"").replacen("steps = 40\n", "", 1).replacen("local_batch_size = 5", &warm, 1);
    let mha = load_with(&text, &["attention.kind=mha"]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(mha.stage[0].index_warmup, None);
    refusal(
        load(&plain.replacen("tokens = 1281", "tokens = 1281\nindex_warmup = true", 1)),
        "stage.2.index_warmup: is true to the end of the run, in which no query would choose its keys",
    );
}

#[test]
fn a_stage_weights_its_own_paths_or_those_of_the_run() {
    let weighted = |more: &str, overrides: &[&str]| {
        let recipe = load(&STAGED.replacen("window = 32", more, 1), overrides).expect("valid");
        [0, 1].map(|stage| recipe.at_stage(&recipe.stages()[stage]).data.weights)
    };
    let two = |weights: [f64; 2]| Some(weights.to_vec());
    let run = ["data.paths=[\"a\", \"b\"]", "data.weights=[1, 2]"];
    assert_eq!(weighted("weights = [3, 1]", &run), [two([1.0, 2.0]), two([3.0, 1.0])]);
    assert_eq!(weighted("paths = [\"c\", \"d\"]\nweights = [3, 1]", &[]), [None, two([3.0, 1.0])]);
    assert_eq!(weighted("paths = [\"c\", \"d\"]", &run), [two([1.0, 2.0]), None]);
}

#[test]
fn stages_are_overridden_by_number() {
    let load = |items: &[&str]| load(STAGED, items);
    let recipe = load(&["stage.1.steps=3", "stage.2.steps=4", "stage.2.window=8"]).expect("valid");
    assert_eq!((recipe.training.steps, recipe.stage[1].steps), (7, 4));
    assert_eq!(recipe.stage[1].window, Some(8));
    refusal(load(&["stage.3.steps=3"]), "--set stage.3.steps=3: stage.3.steps: there is no stage 3");
    refusal(load(&["stage.1.step=3"]), "did you mean steps?");
    refusal(load(&["stage=3"]), "section.key=value");
}
