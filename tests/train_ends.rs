//! How a run ends before its last step, and how it is made longer.
use crate::tiny_run::{INTERVAL, STEPS, TinyRun, refused, succeed, text};
use sieve_testing::says;

#[test]
fn stop_after_ends_a_run_as_a_signal_would() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    // Far fewer steps than the warm-up, as a smoke run of any recipe.
    let printed = succeed(&mut tiny.train("run", "--stop-after 3"));
    assert!(printed.contains("stopped at step 3 of 40"), "{printed}");
    assert!(tiny.path("run/checkpoint/step-3").is_dir());
    let printed = succeed(&mut tiny.train("run", "--resume --stop-after 5"));
    assert!(printed.contains("stopped at step 8 of 40"), "{printed}");
    let printed = succeed(&mut tiny.train("run", "--resume --stop-after 1000"));
    assert!(printed.contains("trained 32 steps"), "{printed}");
    tiny.assert_same_end("run", "reference");
    tiny.assert_same_metrics("run", "reference");
    refused(&mut tiny.train("none", "--stop-after 0"), "--stop-after");
}

#[test]
fn a_longer_run_says_its_rate_and_may_have_a_schedule_of_its_own() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "");
    let rates = |out: &str| -> Vec<f64> {
        let lines = tiny.metrics(out, "step").into_values();
        lines.map(|line| line["lr"].as_f64().expect("a rate")).collect()
    };
    let printed = succeed(&mut tiny.train("run", "--resume"));
    says(&printed, "nothing to do | --resume --extend 80");

    // Ten steps of decay end at step 40; the new schedule's begin at step 46.
    let longer = "--resume --set training.steps=60 --stop-after 2";
    let printed = succeed(&mut tiny.train("run", longer));
    says(
        &printed,
        "note: training.steps was 40, is now 60 | \
         note: the learning rate was 1.00e-3 at step 40, is 1.00e-2 at step 41 and 6.67e-4 at step 60 | \
         --extend 60 instead of training.steps",
    );

    // A schedule of its own: four steps of warm-up, and the last quarter decays.
    tiny.trained("own", "");
    let own = "--resume --extend 60";
    let printed = succeed(&mut tiny.train("own", &format!("{own} --stop-after 7")));
    assert!(printed.contains("is 2.50e-3 at step 41"), "{printed}");
    // The same command goes on, and with nothing left says so.
    let printed = succeed(&mut tiny.train("own", own));
    assert!(printed.contains("continuing at step 47"), "{printed}");
    let printed = succeed(&mut tiny.train("own", own));
    assert!(printed.contains("nothing to do"), "{printed}");
    let rates = rates("own");
    assert_eq!(rates.len(), 60);
    let expected = [2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2];
    assert!(
        rates[40..45]
            .iter()
            .zip(expected)
            .all(|(rate, wanted)| (rate - wanted).abs() < 1e-9),
        "{rates:?}"
    );
    assert!(rates[59] < rates[58] && rates[54] == 1e-2, "{rates:?}");
    tiny.refuse(
        &mut tiny.train("own", "--resume --extend 50"),
        "--extend 50 | step 60 of 60 | name a step after 60",
    );
    tiny.trained("short", "--stop-after 4");
    tiny.refuse(
        &mut tiny.train("short", "--resume --extend 80"),
        "step 4 of 40 | --resume first",
    );
    refused(&mut tiny.train("new", "--extend 80"), "--resume");

    // A key that may not change names the way to a new run.
    tiny.refuse(
        &mut tiny.train("own", "--resume --set optimizer.lr=1e-4"),
        "optimizer.lr was 0.01, is now 0.0001 | --branch-from CHECKPOINT --out DIR",
    );
}

#[test]
fn a_few_more_steps_end_at_the_rate_of_the_end_before() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set lr_scheduler.warmup_steps=20");
    let mut done = STEPS;
    // A tenth, a fifth and all of the steps so far; the warm-up of the recipe alone is longer than the first two.
    for more in [4, 9, 53] {
        let all = done + more;
        succeed(&mut tiny.train(
            "run",
            &format!("--resume --set lr_scheduler.warmup_steps=20 --extend {all}"),
        ));
        let rates = tiny.metrics("run", "step").into_values();
        let rates = rates
            .map(|line| line["lr"].as_f64().expect("a rate"))
            .collect::<Vec<_>>();
        let [end, new_end] = [done, all].map(|step| rates[step as usize - 1]);
        // Ten steps of decay ended at a tenth of the highest rate.
        assert!(new_end <= end + 1e-9 && end < 1.01e-3, "{more} more steps: {rates:?}");
        let new = &rates[done as usize..];
        let highest = new.iter().copied().fold(0.0, f64::max);
        assert!((highest - 1e-2).abs() < 1e-9, "{more} more steps: {new:?}");
        done = all;
    }
    // The same command as a branch says what a branch can do.
    let branch = format!("--branch-from run/checkpoint/step-{done} --set training.steps={done}");
    let printed = succeed(&mut tiny.train("branch", &branch));
    says(
        &printed,
        &format!("nothing to do | --branch-from with --set training.steps={}", 2 * done),
    );
    assert!(!printed.contains("--extend"), "{printed}");
}

#[test]
fn the_step_line_fits_a_terminal_and_the_log_has_all() {
    let tiny = TinyRun::dma();
    let printed = succeed(&mut tiny.train("run", "--stop-after 8"));
    let steps = || printed.lines().filter(|line| line.starts_with("step: "));
    assert_eq!(steps().count(), 8);
    assert!(
        steps().all(|line| line.chars().count() < 80 && line.contains("  lr ")),
        "{printed}"
    );
    let log = tiny.read("run/log");
    says(&log, "density:  | tflops: ");
    let times = tiny.metrics("run", "step").into_values();
    let times = times.map(|line| line["unix_seconds"].as_f64().expect("a time"));
    let times = times.collect::<Vec<_>>();
    assert!(times.is_sorted() && times[0] > 1.7e9, "{times:?}");
}

#[test]
fn a_tokenizer_of_any_name_for_its_end_token_trains() {
    let tiny = TinyRun::dma();
    tiny.prints("tokenizer train --data corpus --vocab-size 300 --out t.json");
    let json = tiny.read("t.json");
    tiny.write("t.json", json.replace("<|endoftext|>", "<|over|>"));
    let train = "--set tokenizer.path=t.json --stop-after 4";
    refused(&mut tiny.train("run", train), "tokenizer.eos_token | \"<|over|>\"");
    succeed(&mut tiny.train("run", &format!("{train} --set tokenizer.eos_token=<|over|>")));
    let of_run = "--checkpoint run --device cpu";
    tiny.prints(&format!("eval ppl --recipe-validation {of_run}"));
    tiny.prints(&format!("generate --prompt the --max-new-tokens 4 {of_run}"));
    tiny.prints("export --checkpoint run --out exported");
    let config = tiny.read("exported/tokenizer_config.json");
    assert!(config.contains("<|over|>"), "{config}");
}

#[test]
fn max_tokens_cuts_a_long_document() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--stop-after 4");
    let long = "the cat sees the river.\n".repeat(2000);
    tiny.write("long.txt", long);
    let ppl = "eval ppl --json --device cpu --checkpoint run --data long.txt --max-tokens 100";
    let output = tiny.sieve(ppl).output().expect("the program starts");
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output)));
    assert_eq!(
        (&report["num_tokens"], &report["num_documents"]),
        (&100.into(), &1.into())
    );
    let per_token = report["num_bytes"].as_f64().expect("a number") / 100.0;
    assert!((1.0..12.0).contains(&per_token), "{report}");
}

#[test]
fn a_short_recipe_trains() {
    let tiny = TinyRun::dma();
    let recipe = "[model]\nhidden_size = 32\nnum_hidden_layers = 2\nnum_attention_heads = 2\nnum_key_value_heads = 1\n\
                  [attention]\nkind = \"mha\"\n[tokenizer]\ntrain = { vocab_size = 300 }\n\
                  [data]\npaths = [\"corpus/*.txt\"]\n[training]\nsteps = 20\nseq_len = 32\nlocal_batch_size = 8\n\
                  [optimizer]\nlr = 1e-2\n";
    tiny.write("short.toml", recipe);
    tiny.prints("train --recipe short --device cpu --out run");
    let config = tiny.read("run/config.toml");
    says(
        &config,
        "intermediate_size = 96 | head_dim = 16 | warmup_steps = 4 | decay_ratio = 0.2",
    );
    // Twice as long: the warm-up that the recipe leaves open was over.
    let more = "train --recipe short --device cpu --out run --resume --set training.steps=40";
    let printed = tiny.prints(more);
    says(&printed, "lr_scheduler.warmup_steps was 4, is now 8");
    assert!(tiny.path("run/checkpoint/step-40").is_dir() && STEPS > INTERVAL);
}
