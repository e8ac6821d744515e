//! `sieve eval needle` through the program: every kind, selectors, the picture, and mistakes.
use crate::tiny_run::{TinyRun, heads_of, json, refused};
use serde_json::Value;
use sieve_testing::says;

/// Room for a needle in the tiny tokenizer, and a haystack before it.
const LONGER: &str = "--set model.max_position_embeddings=512 --set training.steps=4";

/// The kinds with windows far below the lengths asked for.
const KINDS: [&str; 8] = [
    "kind = \"mha\"",
    "kind = \"swa\"\nsliding_window = 16",
    "kind = \"dma\"\nkeep_window_size = 16\na_init = 0.5",
    "kind = \"nsa\"\ncompress_block_size = 8\ncompress_stride = 4\ncompress = \"mean\"\nselect_block_size = 8\n\
     num_selected_blocks = 3\nwindow_size = 16",
    "kind = \"mla\"\nkv_lora_rank = 16\nqk_rope_head_dim = 8",
    "kind = \"infllm_v2\"\nnum_selected_blocks = 4",
    "kind = \"moba\"\nnum_selected_blocks = 3",
    "kind = \"msa\"\nnum_selected_blocks = 3",
];

/// A tiny run of a kind, and `eval needle` on it.
fn trained(attention: &str, more: &str) -> TinyRun {
    let tiny = TinyRun::new(attention);
    tiny.trained("run", &format!("{LONGER} {} {more}", heads_of(attention)));
    tiny
}

fn asked(tiny: &TinyRun, more: &str) -> String {
    tiny.prints(&format!("eval needle --checkpoint run --device cpu {more}"))
}

#[test]
fn needle_grids_are_asked_of_every_kind() {
    for attention in KINDS {
        let tiny = trained(attention, "");
        let grid = "--lengths 400,300 --depths 0,50,100 --needles 2 --buffer 160";
        let report = json(&asked(&tiny, &format!("{grid} --json")));
        let method = &report["methods"][0];
        let cells = method["cells"].as_array().expect("a list");
        let places: Vec<_> = cells
            .iter()
            .map(|cell| (cell["length"].as_u64(), cell["depth"].as_f64()))
            .collect();
        let expected = [300, 400].map(|n| [0.0, 50.0, 100.0].map(|d| (Some(n), Some(d))));
        assert_eq!(places, expected.concat());
        assert_eq!(method["num_needles"], 12);
        let rank = method["mean_rank"].as_f64().expect("a number");
        assert!((1.0..=11.0).contains(&rank), "{report}");
        assert_eq!(report["trained_length"], 32);
        // The same question gets the same answer.
        assert_eq!(json(&asked(&tiny, &format!("{grid} --json"))), report);
        let text = asked(&tiny, grid);
        says(&text, "12 needles | chance");
    }
}

#[test]
fn needle_maps_are_drawn_for_every_selector() {
    let tiny = trained(KINDS[0], "");
    tiny.write(
        "text.txt",
        "The fox sees a dog. The dog sees the fox again. ".repeat(60),
    );
    let own_and = "--selector streamingllm:n_init=2,n_local=20,min_prefill_tokens=0 --selector \
                   meanpool:block=16,tau=1,min_prefill_tokens=0 --chunk 64";
    let grid = "--data text.txt --lengths 256,512 --grid 3 --buffer 160";
    let report = json(&asked(&tiny, &format!("{grid} {own_and} --json")));
    let [own, window, all] = &report["methods"].as_array().expect("a list")[..] else {
        panic!("{report}");
    };
    assert_eq!(own["selector"], Value::Null);
    assert_eq!(all["cells"], own["cells"]);
    assert_ne!(window["cells"], own["cells"]);
    let density = window["density"].as_f64().expect("a prefill method");
    assert!(density < 0.3 && all["density"] == 1.0, "{report}");
    let text = asked(
        &tiny,
        &format!("{grid} --selector 0=dense/1-=quest:page=4,budget=16,dense_layers=0 --plot picture.svg"),
    );
    says(
        &text,
        "mha, its own | \nlayer 0 dense on the CPU; layer 1 quest on the CPU\n",
    );
    let picture = tiny.read("picture.svg");
    assert!(picture.starts_with("<svg") && picture.contains("quest"));
    // Two lengths, three depths, two scores, two methods.
    assert_eq!(picture.matches("<title>").count(), 24);
    // One object, and nothing else.
    let text = asked(&tiny, &format!("{grid} --json --plot other.svg"));
    assert_eq!(text.trim().lines().count(), 1, "{text}");
    assert!(json(&text)["methods"].is_array() && tiny.path("other.svg").is_file());
}

#[test]
fn needle_mistakes_are_told_and_change_nothing() {
    let tiny = trained(KINDS[0], "");
    tiny.write("text.txt", "The fox sees a dog. ".repeat(20));
    tiny.refuses_each(
        "eval needle --checkpoint run --device cpu --buffer 160",
        r#"
        --lengths 513 => lengths is 513 | end at 512
        --lengths 160 => lengths is 160 | no haystack
        --lengths 300,x => 'x' | --lengths
        --lengths 300 --depths 101 => depths is 101 | 0 to 100
        --lengths 300 --depths -1 => depths is -1 | 0 to 100
        --lengths 300 --depths nan => depths is NaN | 0 to 100
        --lengths 300 --grid 0 => --grid is 0
        --lengths 300 --needles 0 => needles is none | at least one
        --lengths 512 --data text.txt => the haystack has | needs 352
        --lengths 300 --data nothing.txt => nothing.txt | matches no file
        --lengths 300 --selector quset => did you mean quest?
        --lengths 300 --chunk 64 => --selector
        --lengths 300 --chunk 64 --selector quest => token by token
        --lengths 300 --chunk 64 --selector meanpool => min_prefill_tokens
        --lengths 300 --chunk 0 --selector meanpool => chunk is 0
        --lengths 300 --plot no/where.svg => no/where.svg | no folder
        --lengths 300 --plot corpus => corpus | is a folder
    "#,
    );
    let on = |more: &str| tiny.sieve(&format!("eval needle --device cpu {more}"));
    tiny.refuse(&mut on("--checkpoint nowhere"), "nowhere | no checkpoint");
    tiny.refuse(&mut on(""), "--checkpoint");
    let small = "--checkpoint run --lengths 300 --depths 50 --buffer 30";
    tiny.refuse(&mut on(small), "30 are kept | use --buffer");
    let window = trained(KINDS[1], "");
    refused(
        &mut window.sieve("eval needle --checkpoint run --lengths 300 --buffer 160 --device cpu --selector quest"),
        "quest selects for dense attention",
    );
}

/// A model that has learned one needle by heart says it, and ranks it first.
#[test]
fn needle_scores_are_full_for_a_model_that_knows_the_answer() {
    let tiny = trained(KINDS[1], "");
    let question = "--lengths 400 --depths 50 --buffer 160 --json";
    let before = json(&asked(&tiny, question));
    let example = &before["methods"][0]["example"]["statement"];
    let statement = example.as_str().expect("a text");
    for n in 0..60 {
        let text = format!("{statement}\n\n").repeat(20 + n);
        tiny.write(&format!("corpus/known{n}.txt"), text);
    }
    tiny.trained(
        "knows",
        "--set model.max_position_embeddings=512 --set training.steps=120",
    );
    let known = json(&tiny.prints(&format!("eval needle --checkpoint knows --device cpu {question}")));
    let method = &known["methods"][0];
    assert_eq!(method["found"], 1.0, "{known}");
    assert_eq!(method["mean_rank"], 1.0, "{known}");
    assert_eq!(before["methods"][0]["found"], 0.0, "{before}");
}

/// The trained model of the repository, and what its card says of it: a number in twenty sentences is found by the
/// model itself, and under a selector in its dense layers.
#[test]
fn the_model_in_the_box_finds_numbers_and_takes_selectors() {
    let tiny = TinyRun::new(KINDS[0]);
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../checkpoints/tiny");
    let places = "--lengths 512 --depths 0,50,100 --needles 2 --device cpu --json";
    let report = json(&tiny.prints(&format!(
        "eval needle --checkpoint {model} {places} --selector xattention:tau=0.7"
    )));
    let [own, xattention] = [0, 1].map(|n| &report["methods"][n]);
    assert_eq!(own["found"], 1.0, "{report}");
    assert!(xattention["mean_rank"].as_f64().expect("a number") < 2.0, "{report}");
    let paths = xattention["paths"].as_array().expect("a list").len();
    assert_eq!(paths, 2, "a path for each dense layer: {report}");
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let lengths = "--lengths 512 --windows 1 --device cpu --json";
    let text = format!("eval selectors --checkpoint {model} --data {readme} --selector xattention:tau=0.7 {lengths}");
    let report = json(&tiny.prints(&text));
    assert_eq!(
        report["selectors"][0]["layers"].as_array().expect("a list").len(),
        2,
        "{report}"
    );
}
