//! Selectors on a checkpoint, through the program: perplexity, generation and the comparison.
use crate::tiny_run::{TinyRun, json, number, refused, succeed};
use serde_json::Value;
use sieve_testing::{cases, says};
use std::fs;

/// Methods with settings small enough for the tiny recipe's 32 tokens, and decode methods.
const SELECTORS: &[&str] = &[
    "streamingllm:n_init=2,n_local=8,min_prefill_tokens=0",
    "meanpool:block=4,tau=0.3,min_prefill_tokens=0",
    "momo:gamma=4,beta=4,chi=8,k=1,k_exact=1,first_dense_layers=0,min_prefill_tokens=0",
    "h2o:heavy=3,recent=3",
    "quest:page=2,budget=6,dense_layers=0",
    "streamingllm:n_init=2,n_local=6,reindex=true",
    "infllm:init=2,local=8,block=4,topk=1,repr=2,chunk=1",
];

fn run_of(tiny: &TinyRun) -> String {
    tiny.trained("run", "");
    tiny.write(
        "text.txt",
        "the fox sees a dog and the dog sees the fox again and again ".repeat(40),
    );
    "run".to_owned()
}

#[test]
fn selectors_help_needs_no_checkpoint() {
    let tiny = TinyRun::new("kind = \"mha\"");
    for command in [
        "eval ppl --selector help",
        "generate --selector help",
        "eval selectors --selector help",
    ] {
        let text = tiny.prints(command);
        says(&text, "bfla | momo | flexprefill | snapkv | exact_top | tau=0.9");
    }
}

#[test]
fn selectors_run_on_a_dense_checkpoint() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    let ppl = |more: &str| {
        json(&tiny.prints(&format!(
            "eval ppl --checkpoint {run} --data text.txt --device cpu --json {more}"
        )))
    };
    let dense = ppl("");
    assert!(dense.get("selector").is_none());
    let all = ppl("--selector meanpool:block=4,tau=1,min_prefill_tokens=0");
    let loss = |report: &Value| number(&report["loss"]);
    assert!((loss(&all) - loss(&dense)).abs() < 1e-5, "{all} {dense}");
    assert_eq!(all["prefill_perplexity"], true);
    for selector in SELECTORS {
        let report = ppl(&format!("--selector {selector}"));
        let pairs = ["pairs", "dense_pairs"].map(|key| number(&report["selection"][key]));
        let density = pairs[0] / pairs[1];
        assert!(loss(&report).is_finite() && density < 1.4, "{report}");
        assert!(
            (loss(&report) - loss(&dense)).abs() > 1e-7,
            "{selector} changed nothing: {report}"
        );
        let generate = format!("generate --checkpoint {run} --max-new-tokens 6 --device cpu");
        let mut generate = tiny.sieve(&format!("{generate} --selector {selector}"));
        let text = succeed(generate.args(["--prompt", "the fox sees a dog and"]));
        assert!(text.starts_with("the fox sees a dog and"), "{text}");
    }
    let text = tiny.prints(&format!(
        "eval ppl --checkpoint {run} --data text.txt --device cpu --selector {}",
        SELECTORS[1]
    ));
    assert!(text.contains("prefill perplexity"), "{text}");
    assert!(text.contains("on the CPU") && !text.contains("GPU"), "{text}");
    // A chunk of InfLLM's queries chooses together, later ones for earlier ones; by default each chooses alone.
    let infllm = "--selector infllm:init=2,local=8,block=4,topk=1,repr=2";
    assert_eq!(ppl(infllm)["prefill_perplexity"], false);
    let chunk = format!("{infllm},chunk=8");
    assert_eq!(ppl(&chunk)["prefill_perplexity"], true);
    let text = tiny.prints(&format!(
        "eval ppl --checkpoint {run} --data text.txt --device cpu {chunk}"
    ));
    assert!(text.contains("prefill perplexity"), "{text}");

    let selectors: String = SELECTORS
        .iter()
        .map(|selector| format!(" --selector {selector}"))
        .collect();
    let table = format!(
        "eval selectors --checkpoint {run} --data text.txt --lengths 16,32 --windows 2 --device cpu{selectors}"
    );
    let report = json(&tiny.prints(&format!("{table} --json")));
    let rows = report["selectors"].as_array().expect("a list");
    assert_eq!(rows.len(), 2 * SELECTORS.len());
    assert!(
        rows.iter()
            .all(|row| row["density"].as_f64().is_some_and(|x| x > 0.0) && row["loss"].is_f64())
    );
    let text = tiny.prints(&format!("{table} --plot picture.svg --maps maps"));
    says(&text, "32 tokens: dense loss | quest");
    assert_eq!(text.matches("chose and attended on the CPU").count(), 2, "{text}");
    assert!(!text.lines().any(|line| line.starts_with("layers 0-1 ")), "{text}");
    let picture = tiny.read("picture.svg");
    for name in [
        "streamingllm-n_init=2-n_local=8-min_prefill_tokens=0",
        "meanpool-block=4-tau=0.3-min_prefill_tokens=0",
    ] {
        let map = tiny.read(&format!("maps/{name}.svg"));
        assert!(map.starts_with("<svg") && map.ends_with("</svg>\n"), "{name}");
        says(
            &map,
            "Kept blocks of | >layer 1< | >head 1< | >query, token< | >key, token< | >32< | >after the query<",
        );
    }
    assert_eq!(fs::read_dir(tiny.path("maps")).expect("written").count(), 4);
    let name = "streamingllm:n_init=2,min_prefill_tokens=0 (n_local)";
    assert!(picture.starts_with("<svg") && picture.contains(name), "{picture}");
}

/// The values of the curves are the program's own, and settings of one method have rows, lines and files of their own.
#[test]
fn selectors_of_one_method_stand_apart() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    let base = format!("eval selectors --checkpoint {run} --data text.txt --lengths 32 --windows 1 --device cpu");
    let text = tiny.prints(&format!("{base} --plot all.svg --maps all"));
    assert!(text.contains("wrote all.svg"), "{text}");
    let picture = tiny.read("all.svg");
    says(&picture, "momo:first_dense_layers=0 (k)");
    assert!(tiny.path("all/momo-first_dense_layers=0.svg").is_file());

    let settings = ["block=4,tau=0.3", "block=8,tau=0.3", "block=4,tau=0.85"];
    let asked: String = settings
        .iter()
        .map(|setting| format!(" --selector meanpool:{setting},min_prefill_tokens=0"))
        .collect();
    let text = tiny.prints(&format!("{base}{asked} --plot three.svg --maps three"));
    let mut maps = Vec::new();
    for (block, tau) in [(4, "0.3"), (8, "0.3"), (4, "0.85")] {
        let label = format!("meanpool:block={block},tau={tau},min_prefill_tokens=0 ");
        assert!(text.lines().any(|line| line.starts_with(&label)), "{label}: {text}");
        let file = format!("three/meanpool-block={block}-tau={tau}-min_prefill_tokens=0.svg");
        maps.push(fs::read(tiny.path(&file)).unwrap_or_else(|e| panic!("{file}: {e}")));
    }
    assert!(maps[0] != maps[1] && maps[0] != maps[2], "three maps");
    // Two lines, of the five values and those asked for: 0.3 and 0.85 on one, 0.3 on the other.
    let picture = tiny.read("three.svg");
    // Each has a mark more in the legend.
    assert_eq!(picture.matches("<polygon").count(), 7 + 6 + 2, "{picture}");
    for block in [4, 8] {
        let name = format!("meanpool:block={block},min_prefill_tokens=0 (tau)\n<");
        assert!(picture.contains(&name), "{name}: {picture}");
    }
    let report = json(&tiny.prints(&format!("{base}{asked} --json")));
    let rows = report["selectors"].as_array().expect("a list");
    assert_eq!(rows[1]["label"], "meanpool:block=8,tau=0.3,min_prefill_tokens=0");
    assert_eq!(report["failed"], Value::Array(Vec::new()));
}

#[test]
fn selectors_of_which_one_fails_are_told_and_the_rest_is_written() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    // The bidirectional form needs all tokens in one call, which chunks do not give it.
    let command = format!(
        "eval selectors --checkpoint {run} --data text.txt --lengths 16,32 --windows 1 --device cpu --chunk 8 \
         --selector \
         ba_att:causal=false,block=4,segment=8,min_prefill_tokens=0 --selector {} --plot rest.svg",
        SELECTORS[1]
    );
    let words = "ba_att | causal=false needs all tokens at once | 32 tokens";
    let output = tiny.sieve(&command).output().expect("the program starts");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    refused(&mut tiny.sieve(&command), words);
    says(&out, "16 tokens: dense loss | 32 tokens: dense loss");
    let label = "meanpool:block=4,tau=0.3,min_prefill_tokens=0 ";
    assert_eq!(out.lines().filter(|line| line.starts_with(label)).count(), 2);
    let picture = tiny.read("rest.svg");
    assert!(picture.contains("meanpool:block=4,min_prefill_tokens=0 (tau)"));
    let output = tiny.sieve(&format!("{command} --json")).output().expect("it starts");
    let report = json(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(report["selectors"].as_array().map(Vec::len), Some(2));
    let failed = report["failed"].to_string();
    assert!(failed.contains("needs all tokens at once"), "{failed}");
}

#[test]
fn selectors_read_prompts_in_chunks_as_they_read_them_whole() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    let ppl = |more: &str| {
        let command = format!("eval ppl --checkpoint {run} --data text.txt --device cpu --json {more}");
        json(&tiny.prints(&command))
    };
    let loss = |report: &Value| number(&report["loss"]);
    let pairs = |report: &Value| number(&report["selection"]["pairs"]);
    for selector in [SELECTORS[0], SELECTORS[1], SELECTORS[2]] {
        let (whole, cut) = (
            ppl(&format!("--selector {selector}")),
            ppl(&format!("--selector {selector} --chunk 8")),
        );
        assert_eq!((&whole["chunk"], &cut["chunk"]), (&Value::Null, &8.into()));
        assert!((loss(&whole) - loss(&cut)).abs() < 1e-5, "{whole} {cut}");
        assert!((pairs(&whole) / pairs(&cut) - 1.0).abs() < 1e-9, "{whole} {cut}");
        assert!(
            cut["selection"]["calls"].as_u64() > whole["selection"]["calls"].as_u64(),
            "{whole} {cut}"
        );
    }
    let generate = |more: &str| {
        // No times, which differ.
        let mut command = tiny.sieve(&format!(
            "generate --quiet --checkpoint {run} --device cpu --temperature 0 --max-new-tokens 8 --selector {} {more}",
            SELECTORS[1]
        ));
        let prompt = "the fox sees a dog and the dog sees the fox again";
        succeed(command.args(["--prompt", prompt]))
    };
    assert_eq!(generate("--chunk 8"), generate(""));
    let table = json(&tiny.prints(&format!(
        "eval selectors --checkpoint {run} --data text.txt --lengths 32 --windows 2 --device cpu --chunk 8 --json"
    )));
    let rows = table["selectors"].as_array().expect("a list");
    assert!(rows.len() > 10 && rows.iter().all(|row| row["chunk"] == 8));
    // Too large for a context of 64.
    let left_out = table["left_out"].to_string();
    assert!(left_out.contains("pbs: segment=256"), "{left_out}");
}

/// The layers that a selector leaves alone are the model's own, and every command says what each layer did.
#[test]
fn selectors_differ_by_layer() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    let on = format!("--checkpoint {run} --device cpu");
    let ppl = |selector: &str| {
        let command = format!("eval ppl {on} --data text.txt --json --selector {selector}");
        json(&tiny.prints(&command))
    };
    let number = |report: &Value, key: &str| report["selection"][key].as_f64().expect("a number");
    let loss = |report: &Value| report["loss"].as_f64().expect("a number");
    for (method, path) in [(SELECTORS[1], "meanpool"), (SELECTORS[4], "quest")] {
        let (dense, sparse) = (ppl("dense"), ppl(method));
        let (first, last) = (
            ppl(&format!("0={method}/1-=dense")),
            ppl(&format!("0=dense/1-={method}")),
        );
        assert_eq!(number(&dense, "pairs"), number(&dense, "dense_pairs"));
        assert_eq!(loss(&ppl("0-1=dense")), loss(&dense));
        assert_eq!(loss(&ppl(&format!("0-={method}"))), loss(&sparse));
        for mixed in [&first, &last] {
            let pairs = |report| number(report, "pairs");
            assert!(pairs(mixed) > pairs(&sparse) && pairs(mixed) < pairs(&dense));
            assert!((loss(mixed) - loss(&dense)).abs() > 1e-7);
            assert!((loss(mixed) - loss(&sparse)).abs() > 1e-7);
        }
        let paths = |report: &Value| report["paths"].to_string();
        assert_eq!(
            paths(&last),
            format!(
                "[{{\"first\":0,\"last\":0,\"path\":\"dense on the CPU\"}},\
                 {{\"first\":1,\"last\":1,\"path\":\"{path} on the CPU\"}}]"
            )
        );
    }
    let said = "layer 0 dense on the CPU; layer 1 meanpool on the CPU";
    let by_layer = format!("0=dense/1-={}", SELECTORS[1]);
    for command in [
        format!("eval ppl {on} --data text.txt"),
        format!("eval selectors {on} --data text.txt --lengths 32 --windows 1"),
    ] {
        let command = format!("{command} --selector {by_layer}");
        let output = tiny.sieve(&command).output().expect("it starts");
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && out.contains(said), "{command}: {out}{err}");
        assert_eq!(out.matches(said).count(), 1, "{out}");
    }
    // A method of prompts beside one of the tokens after them.
    let both = format!("0={}/1-={}", SELECTORS[1], SELECTORS[4]);
    let generate = |selector: &str| {
        let command = format!(
            "generate {on} --quiet --prompt the-fox-sees-a-dog-and-the-dog-sees-the-fox --max-new-tokens 6 \
             --temperature 0 --json --selector {selector}"
        );
        json(&tiny.prints(&command))
    };
    let report = generate(&both);
    let paths = report["paths"].to_string();
    says(&paths, "meanpool on the CPU | quest on the CPU");
    // Everything kept in both phases is the model's own text.
    let all = generate("0=meanpool:block=4,tau=1,min_prefill_tokens=0/1-=quest:page=2,budget=64");
    assert_eq!(all["text"], generate("dense")["text"]);
}

/// Settings of a file, crossed, with their losses as a picture.
#[test]
fn selectors_come_from_a_grid() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    tiny.write(
        "grid.toml",
        "selectors = [\"0=dense/1-=a_shape:n_init=2,n_local=8,min_prefill_tokens=0\"]\n\
         [[grid]]\nselector = \"meanpool\"\nblock = [4, 8]\ntau = [0.3, 0.85]\nmin_prefill_tokens = 0\n\
         [[grid]]\nselector = \"momo\"\nk = [1, 9]\nk_exact = 2\nmin_prefill_tokens = 0\n",
    );
    let command = format!(
        "eval selectors --checkpoint {run} --data text.txt --lengths 16,32 --windows 1 --device cpu --grid grid.toml \
         --selector {}",
        SELECTORS[0]
    );
    let report = json(&tiny.prints(&format!("{command} --json")));
    let rows = report["selectors"].as_array().expect("a list");
    let labels: Vec<&str> = rows.iter().filter_map(|row| row["label"].as_str()).collect();
    let wanted = [
        SELECTORS[0],
        "0=dense/1-=a_shape:n_init=2,n_local=8,min_prefill_tokens=0",
        "meanpool:block=4,tau=0.3,min_prefill_tokens=0",
        "meanpool:block=4,tau=0.85,min_prefill_tokens=0",
        "meanpool:block=8,tau=0.3,min_prefill_tokens=0",
        "meanpool:block=8,tau=0.85,min_prefill_tokens=0",
        "momo:k=9,k_exact=2,min_prefill_tokens=0",
    ];
    assert_eq!(labels, [wanted, wanted].concat());
    assert!(report["left_out"].to_string().contains("k_exact=2 is more than k=1"));
    let text = tiny.prints(&format!("{command} --scores scores.svg"));
    assert!(text.contains("wrote scores.svg") && text.contains("left out: momo: k_exact=2"));
    let picture = tiny.read("scores.svg");
    // A panel a curve, against density and against time.
    for (name, panels) in [
        ("meanpool:block=4,min_prefill_tokens=0\n<", 2),
        ("meanpool:block=8,min_prefill_tokens=0\n<", 2),
        ("tau 0.3, 0.85\n<", 2),
        ("momo:k_exact=2,min_prefill_tokens=0\n<", 2),
        ("k 9\n<", 2),
    ] {
        let found = picture.matches(name).count();
        assert!(found >= panels, "{name}: {found}, {picture}");
    }
    // Seven rows on five curves; each panel has the points of all behind its own.
    let circles = |radius: u32| picture.matches(&format!("r=\"{radius}\"")).count();
    assert_eq!((circles(2), circles(4)), (2 * 5 * 7, 2 * 7), "{picture}");
}

/// Models of other kinds, trained on the same text, in the table of a dense one.
#[test]
fn selectors_stand_beside_models_trained_sparse() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let run = run_of(&tiny);
    let others = [
        ("swa", "--set attention.sliding_window=8"),
        ("dma", "--set attention.keep_window_size=8 --set attention.a_init=0.5"),
        (
            "nsa",
            "--set attention.compress_block_size=4 --set attention.compress_stride=2 --set attention.compress=mean \
             --set attention.select_block_size=4 --set attention.num_selected_blocks=3 --set attention.window_size=8",
        ),
    ];
    let mut compare = String::new();
    for (kind, sets) in others {
        tiny.trained(kind, &format!("--set attention.kind={kind} {sets}"));
        compare += &format!(" --compare {kind}");
    }
    let table = format!(
        "eval selectors --checkpoint {run} --data text.txt --lengths 16,32 --windows 2 --device cpu \
         --selector {}{compare} --compare {run}",
        SELECTORS[1]
    );
    let report = json(&tiny.prints(&format!("{table} --json")));
    let rows = report["trained"].as_array().expect("a list");
    assert_eq!(rows.len(), 8);
    let of = |length: u64, start: &str| {
        let mut rows = rows.iter().filter(|row| {
            let attention = row["attention"].as_str().expect("a name");
            row["num_tokens"] == length && attention.starts_with(start)
        });
        rows.next().unwrap_or_else(|| panic!("{start} in {report}"))
    };
    let number = |row: &Value, key: &str| row[key].as_f64().expect("a number");
    // Eight keys of up to 32, whichever they are.
    let eight = (8.0 * 9.0 / 2.0 + 24.0 * 8.0) / (32.0 * 33.0 / 2.0);
    for kind in ["swa", "dma"] {
        assert!((number(of(32, kind), "density") - eight).abs() < 1e-9);
    }
    assert!(number(of(32, "nsa"), "density") > number(of(32, "nsa"), "distinct_density"));
    let selectors = report["selectors"].as_array().expect("a list");
    let dense = selectors.iter().find(|row| row["num_tokens"] == 32);
    let dense = dense.expect("a row of that length");
    assert!((number(of(32, "mha"), "loss") - number(dense, "dense_loss")).abs() < 1e-5);
    for row in rows {
        assert!(number(row, "prefill_ms") > 0.0 && number(row, "loss").is_finite());
    }
    assert!(number(dense, "prefill_ms") > 0.0 && number(dense, "dense_prefill_ms") > 0.0);
    let text = tiny.prints(&table);
    says(
        &text,
        "trained with its own attention | dma, keeps 8 | swa, window 8 | nsa, 3 x 4",
    );
    let with = |more: &str| {
        tiny.sieve(&format!(
            "eval selectors --checkpoint {run} --data text.txt --lengths 32 --windows 1 --device cpu \
             --selector {} {more}",
            SELECTORS[1]
        ))
    };
    refused(&mut with("--compare nowhere"), "--compare nowhere | no checkpoint");
    tiny.trained("words", "--set training.steps=4 --set tokenizer.train.vocab_size=290");
    refused(
        &mut with("--compare words"),
        "--compare words | its tokenizer is not the one",
    );
    tiny.trained(
        "short",
        "--set training.steps=4 --set training.seq_len=16 --set model.max_position_embeddings=16",
    );
    refused(
        &mut with("--compare short"),
        "--compare short | context of 16 | shorter --lengths",
    );
    for (more, words) in [
        ("--chunk 0", "chunk is 0"),
        ("--chunk x", "'x' | --chunk"),
        ("--chunk 8 --maps maps", "--maps"),
        ("--chunk 8 --selector h2o", "h2o | token by token"),
        ("--chunk 8 --selector bfla", "min_prefill_tokens=256"),
        ("--plot no/where.svg", "no/where.svg | no folder"),
    ] {
        tiny.refuse(&mut with(more), words);
    }
    for command in ["eval ppl --data text.txt", "generate --prompt the"] {
        let command = format!("{command} --checkpoint {run} --device cpu --chunk 8");
        tiny.refuses(&command, "--selector");
        let decode = format!("{command} --selector h2o:heavy=3,recent=3");
        tiny.refuses(&decode, "chunk is 8 with h2o");
    }
}

#[test]
fn selectors_mistakes_are_told_and_change_nothing() {
    let tiny = TinyRun::new("kind = \"swa\"\nsliding_window = 8");
    let run = run_of(&tiny);
    let ppl = |selector: &str| {
        tiny.sieve(&format!(
            "eval ppl --checkpoint {run} --data text.txt --device cpu --selector {selector}"
        ))
    };
    for [selector, words] in cases(
        r#"
        xatention => no selector | did you mean xattention?
        pbs:segmnt=256 => no key | did you mean segment?
        xattention:stride=7 => stride=7 does not divide block=128
        meanpool:tau=1.5 => tau=1.5 is outside [0, 1]
        quest:gqa=mean => quest takes no gqa | its keys are page, budget
        meanpool => meanpool selects for dense attention | kind = "mha"
    "#,
    ) {
        tiny.refuse(&mut ppl(selector), words);
    }
    let dense = TinyRun::new("kind = \"mha\"");
    let run = run_of(&dense);
    let command = |selector: &str| {
        dense.sieve(&format!(
            "eval ppl --checkpoint {run} --data text.txt --device cpu --selector {selector}"
        ))
    };
    refused(
        &mut command("pbs:segment=256"),
        "segment=256 is longer than the context of",
    );
    refused(&mut command("dam:map=nowhere.json"), "nowhere.json");
    dense.refuses(
        &format!(
            "eval selectors --checkpoint {run} --data text.txt --lengths 30 --windows 500 \
            --device cpu"
        ),
        "the data holds | give more text",
    );
}
