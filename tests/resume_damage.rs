//! Damaged checkpoints are refused by name, and the one before is used when asked; a full disk loses nothing.
use crate::tiny_run::{INTERVAL, STEPS, TinyRun, refused, succeed, text};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use sieve_testing::{cases, says};
use std::fs;
use std::process::Command;

/// A run of all steps whose latest checkpoint is the second last: as if it had been killed before the end.
fn unfinished(tiny: &TinyRun, out: &str) -> u64 {
    tiny.trained(out, "");
    fs::remove_dir_all(tiny.path(out).join(format!("checkpoint/step-{STEPS}"))).expect("writable");
    STEPS - INTERVAL
}

#[test]
fn damaged_files_are_refused_by_name() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    let latest = unfinished(&tiny, "run");
    let folder = tiny.path("run").join(format!("checkpoint/step-{latest}"));
    let before = latest - INTERVAL;
    let mut random = ChaCha8Rng::seed_from_u64(23);
    let files = [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "config.toml",
        "tokenizer.json",
    ];
    for name in files {
        let path = folder.join(name);
        let whole = fs::read(&path).expect("written");
        let flipped = |byte: usize, bit: u32| {
            let mut bytes = whole.clone();
            bytes[byte] ^= 1 << bit;
            bytes
        };
        let somewhere = random.next_u32() as usize % whole.len();
        for damaged in [
            whole[..whole.len() / 2].to_vec(),
            whole[..whole.len() - 1].to_vec(),
            Vec::new(),
            flipped(0, 0),
            flipped(whole.len() - 1, 3),
            flipped(somewhere, random.next_u32() % 8),
        ] {
            fs::write(&path, &damaged).expect("writable");
            // By its name and with what to type instead; nothing is written, and the one before is not taken silently.
            let named = format!("step-{latest}/{name}");
            let hint = format!("step-{before}");
            tiny.refuse(&mut tiny.train("run", "--resume"), &format!("{named} | {hint}"));
        }
        fs::remove_file(&path).expect("writable");
        tiny.refuse(&mut tiny.train("run", "--resume"), &format!("step-{latest}/{name}"));
        fs::write(&path, whole).expect("writable");
    }

    // Each bit of a few bytes of the state, which is small enough that every one matters.
    let path = folder.join("state.json");
    let whole = fs::read(&path).expect("written");
    let place = |key: &str| {
        let text = String::from_utf8_lossy(&whole).into_owned();
        text.find(key).expect(key) + key.len()
    };
    for byte in [
        place("\"step\": "),
        place("\"next_sample\": "),
        place("\"vocab_size\": "),
    ] {
        for bit in [0, 1, 2] {
            let mut bytes = whole.clone();
            bytes[byte] ^= 1 << bit;
            fs::write(&path, &bytes).expect("writable");
            tiny.refuse(&mut tiny.train("run", "--resume"), "state.json");
        }
    }
    fs::write(folder.join("model.safetensors"), b"no weights").expect("writable");

    // The one before, when asked for; the damaged one is set aside.
    let printed = succeed(&mut tiny.train(
        "run",
        &format!(
            "--resume-from run/checkpoint/{hint}",
            hint = format_args!("step-{before}")
        ),
    ));
    assert!(printed.contains("aside"), "{printed}");
    let aside = folder.with_file_name(format!("step-{latest}.aside-1"));
    assert_eq!(fs::read(aside.join("model.safetensors")).expect("kept"), b"no weights");
    tiny.assert_same_end("run", "reference");
    tiny.assert_same_metrics("run", "reference");
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let tiny = TinyRun::dma();
    let latest = unfinished(&tiny, "run");
    for [more, words] in cases(
        r#"
        --set attention.kind=mha => attention.kind was "dma", is now "mha"
        --set model.hidden_size=48 => model.hidden_size was 32, is now 48
        --set tokenizer.train.vocab_size=310 => tokenizer.train.vocab_size was 300, is now 310
        --set training.seed=4 --set optimizer.lr=2.0 => training.seed | optimizer.lr
    "#,
    ) {
        tiny.refuse(&mut tiny.train("run", &format!("--resume {more}")), words);
        let from = format!("--resume-from run/checkpoint/step-{latest} {more}");
        tiny.refuse(&mut tiny.train("run", &from), words);
        tiny.refuse(&mut tiny.train("new", &from), words);
    }
}

/// Bytes of all files below a folder.
fn bytes_below(tiny: &TinyRun, name: &str) -> usize {
    tiny.snapshot(name).values().map(|(bytes, _)| bytes.len()).sum()
}

#[test]
fn a_full_disk_loses_no_checkpoint() {
    let tiny = TinyRun::dma();
    // Shards outside the small disk, no TensorBoard file on it, and two checkpoints at once do not fit.
    let more = "--set data.cache_dir=shared --set metrics.enable_tensorboard=false --set checkpoint.keep_latest_k=1";
    tiny.trained("reference", more);
    let one = bytes_below(&tiny, &format!("reference/checkpoint/step-{STEPS}"));
    let beside = bytes_below(&tiny, "reference") - one;
    let kib = (one + one / 2 + 2 * beside) / 1024;
    // A private mount: it ends with its processes, and nobody else sees it.
    let script = r#"
        mount -t tmpfs -o size="$1"k tmpfs disk || exit 90
        "$SIEVE" train --recipe tiny.toml --device cpu --out disk/run $MORE; code=$?
        ls disk/run/checkpoint > listing
        mount -o remount,size=64m disk
        "$SIEVE" train --recipe tiny.toml --device cpu --out disk/run $MORE --resume || exit 91
        cp -r disk/run run
        exit $code
    "#;
    let program = tiny.sieve("").get_program().to_owned();
    fs::create_dir(tiny.path("disk")).expect("writable");
    let output = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            &kib.to_string(),
        ])
        .current_dir(tiny.path(""))
        .env("SIEVE", program)
        .env("MORE", more)
        .env("RAYON_NUM_THREADS", "2")
        .output();
    let output = match output {
        Ok(output) if tiny.path("listing").exists() => output,
        Ok(output) => {
            println!("not run: no private mount here: {}", text(&output));
            return;
        }
        Err(error) => {
            println!("not run: unshare: {error}");
            return;
        }
    };
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    says(&said, "No space left | make room");
    assert!(said.contains("step-8.tmp"), "{said}");
    let listing = tiny.read("listing");
    assert_eq!(listing, "step-4\n", "{said}");
    tiny.assert_same_end("run", "reference");
    tiny.assert_same_metrics("run", "reference");
}

#[test]
fn a_limit_on_file_sizes_loses_no_checkpoint() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    let latest = unfinished(&tiny, "run");
    let kept = tiny.checkpoint("run", latest);
    // Half of the weights fit, the shell counts blocks of 512 bytes, and an ignored SIGXFSZ makes the write fail.
    let weights = tiny.path(&format!("run/checkpoint/step-{latest}/model.safetensors"));
    let blocks = fs::metadata(weights).expect("it was written").len() / 1024;
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$SIEVE\" \"$@\"");
    let program = tiny.sieve("").get_program().to_owned();
    let mut command = Command::new("sh");
    command
        .args(["-c", &script, "sh", "train", "--recipe", "tiny.toml", "--device", "cpu"])
        .args(["--out", "run", "--resume"])
        .current_dir(tiny.path(""))
        .env("SIEVE", program)
        .env("RAYON_NUM_THREADS", "2");
    refused(&mut command, "model.safetensors | File too large | make room");
    assert!(tiny.checkpoint("run", latest) == kept);
    assert!(!tiny.path(&format!("run/checkpoint/step-{STEPS}")).exists());
    succeed(&mut tiny.train("run", "--resume"));
    tiny.assert_same_end("run", "reference");
}
