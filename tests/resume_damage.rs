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
    for name in "model.safetensors optimizer.safetensors state.json config.toml tokenizer.json".split(' ') {
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
    for byte in ["\"step\": ", "\"next_sample\": ", "\"vocab_size\": "].map(place) {
        for bit in [0, 1, 2] {
            let mut bytes = whole.clone();
            bytes[byte] ^= 1 << bit;
            fs::write(&path, &bytes).expect("writable");
            tiny.refuse(&mut tiny.train("run", "--resume"), "state.json");
        }
    }
    fs::write(folder.join("model.safetensors"), b"no weights").expect("writable");

    // The one before, when asked for; the damaged one is set aside.
    let from = format!("--resume-from run/checkpoint/step-{before}");
    let printed = succeed(&mut tiny.train("run", &from));
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
    let more = "--set data.cache_dir=shared --set metrics.enable_tensorboard=false --set checkpoint.keep_latest_k=1 \
                --checkpoint-patience 0";
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
        .args(["--user", "--map-root-user", "--mount"])
        .args(["sh", "-c", script, "sh", &kib.to_string()])
        .current_dir(tiny.path(""))
        .env("SIEVE", program)
        .env("MORE", more)
        .env("RAYON_NUM_THREADS", "2")
        .output();
    let output = match output {
        Ok(output) if tiny.path("listing").exists() => output,
        Ok(output) => return println!("not run: no private mount here: {}", text(&output)),
        Err(error) => return println!("not run: unshare: {error}"),
    };
    let said = text(&output);
    // All steps are done; nobody made room in time.
    assert_eq!(output.status.code(), Some(75), "{said}");
    says(
        &said,
        "warning: no checkpoint at step 8 | No space left | training continues | step-8.tmp | make room",
    );
    says(&said, "no checkpoint of step 40 can be written | checkpoint/step-4");
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
    // Half of the weights fit: the shell counts blocks of 512 bytes.
    let weights = tiny.path(&format!("run/checkpoint/step-{latest}/model.safetensors"));
    let blocks = fs::metadata(weights).expect("it was written").len() / 1024;
    let script = format!("ulimit -f {blocks}; exec \"$SIEVE\" \"$@\"");
    let program = tiny.sieve("").get_program().to_owned();
    let mut command = Command::new("sh");
    command
        .args(["-c", &script, "sh", "train", "--recipe", "tiny.toml", "--device", "cpu"])
        .args(["--out", "run", "--resume", "--checkpoint-patience", "0"])
        .current_dir(tiny.path(""))
        .env("SIEVE", program)
        .env("RAYON_NUM_THREADS", "2");
    let output = command.output().expect("the program starts");
    assert_eq!(output.status.code(), Some(75), "{}", text(&output));
    says(&text(&output), "model.safetensors | File too large | make room");
    assert!(tiny.checkpoint("run", latest) == kept);
    assert!(!tiny.path(&format!("run/checkpoint/step-{STEPS}")).exists());
    succeed(&mut tiny.train("run", "--resume"));
    tiny.assert_same_end("run", "reference");
}

/// A run of two steps whose folder of checkpoints leads nowhere until `room` is made.
#[cfg(unix)]
fn without_room(tiny: &TinyRun, out: &str) {
    tiny.trained(out, "--stop-after 2");
    let folder = tiny.path(out).join("checkpoint");
    fs::remove_dir_all(&folder).expect("writable");
    std::os::unix::fs::symlink(tiny.path("room"), folder).expect("writable");
}

#[cfg(unix)]
#[test]
fn the_last_checkpoint_has_a_second_place() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    without_room(&tiny, "run");
    let train = |more: &str| {
        let output = tiny.train("run", more).output().expect("the program starts");
        (output.status.code(), text(&output))
    };
    let (code, said) = train("--resume --checkpoint-patience 0");
    assert_eq!(code, Some(75), "{said}");
    says(
        &said,
        "warning: no checkpoint at step 4 | run/checkpoint | training continues | failure 1 of 10",
    );
    says(
        &said,
        "no checkpoint of step 40 can be written | --resume=auto | --checkpoint-fallback",
    );
    // Tries are first five seconds apart, then twice as long each time.
    let mut waiting = tiny
        .train("run", "--resume")
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let log = || fs::read_to_string(tiny.path("run/log")).unwrap_or_default();
    crate::tiny_run::wait_until("a second try", || log().matches("the next try is in").count() == 2);
    waiting.kill().expect("it waits");
    waiting.wait().expect("it was killed");
    says(&log(), "the next try is in 5 s | the next try is in 10 s");
    let (code, said) = train("--resume --checkpoint-patience 0 --checkpoint-fallback second");
    assert_eq!(code, Some(0), "{said}");
    says(&said, "it goes to the folder of --checkpoint-fallback | second/step-40");
    fs::create_dir(tiny.path("room")).expect("writable");
    fs::rename(tiny.path("second/step-40"), tiny.path("room/step-40")).expect("writable");
    tiny.assert_same_end("run", "reference");
    let (_, said) = train("--resume");
    says(&said, "nothing to do");
}

#[cfg(unix)]
#[test]
fn resume_auto_finds_the_checkpoint_in_its_second_place() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    // One that is older than the run, of an equal recipe, and one of another.
    fs::create_dir(tiny.path("second")).expect("writable");
    let moved = |from: &str, step: u64| {
        let place = tiny.path(&format!("second/step-{step}"));
        fs::rename(tiny.path(&format!("{from}/checkpoint/step-{step}")), place).expect("writable");
    };
    tiny.trained("older", "--stop-after 20");
    moved("older", 20);
    without_room(&tiny, "run");
    tiny.trained("other", "--set training.seed=4 --stop-after 16");
    moved("other", 16);
    let fallback = "--checkpoint-fallback second";
    let more = format!("--resume --checkpoint-patience 0 {fallback} --stop-after 10");
    says(
        &succeed(&mut tiny.train("run", &more)),
        "second/step-10 | with --resume=auto",
    );
    fs::create_dir(tiny.path("room")).expect("writable");
    let said = succeed(&mut tiny.train("run", &format!("--resume=auto {fallback}")));
    says(
        &said,
        "warning: second/step-20 is not taken | before this run began | warning: second/step-16 is not taken | \
         training.seed | note: the run continues from second/step-10; its own folder has none | continuing at step 10",
    );
    tiny.assert_same_end("run", "reference");
    // Its own folder is the later one now.
    let said = succeed(&mut tiny.train("run", &format!("--resume=auto {fallback}")));
    says(&said, "nothing to do");
    assert!(!said.contains("second"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_checkpoint_that_could_not_be_written_is_written_as_soon_as_there_is_room() {
    use crate::tiny_run::{signal, wait_until};
    let tiny = TinyRun::dma();
    without_room(&tiny, "run");
    let mut command = tiny.train(
        "run",
        "--resume --set training.steps=1000000 --set validation.interval=1000000",
    );
    let log = || fs::read_to_string(tiny.path("run/log")).unwrap_or_default();
    let child = command
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the program starts");
    wait_until("a warning", || log().contains("warning: no checkpoint at step"));
    fs::create_dir(tiny.path("room")).expect("writable");
    wait_until("a checkpoint", || log().contains("checkpoint: run/checkpoint/step-"));
    signal(&child, "TERM");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(75), "{}", log());
    succeed(&mut tiny.train("run", "--resume --stop-after 1 --set training.steps=1000000"));
}

#[test]
fn nobody_is_needed_where_the_latest_checkpoint_is_damaged() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    let latest = unfinished(&tiny, "run");
    let before = latest - INTERVAL;
    let folder = tiny.path("run/checkpoint");
    let damage = |step: u64| fs::write(folder.join(format!("step-{step}/model.safetensors")), "no weights");
    damage(latest).expect("writable");
    let printed = succeed(&mut tiny.train("run", "--resume=auto"));
    let words = format!(
        "warning: | step-{latest}/model.safetensors is damaged | kept as | step-{latest}.damaged-1 | \
         continues from | step-{before}"
    );
    says(&printed, &words);
    let aside = folder.join(format!("step-{latest}.damaged-1/model.safetensors"));
    assert_eq!(fs::read(aside).expect("kept"), b"no weights");
    tiny.assert_same_end("run", "reference");
    tiny.assert_same_metrics("run", "reference");
    // Where no checkpoint is whole, a person decides, and all stay.
    let all = tiny.names("run/checkpoint");
    let steps = all
        .iter()
        .filter_map(|name| name.strip_prefix("step-")?.parse::<u64>().ok());
    steps.for_each(|step| damage(step).expect("writable"));
    tiny.refuse(
        &mut tiny.train("run", "--resume=auto --set training.steps=44"),
        "step-40/model.safetensors is damaged",
    );
}

#[test]
fn shards_that_were_changed_are_noticed_while_a_run_trains_on_them() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--stop-after 2");
    let path = tiny.path("run/data/train.bin");
    let mut bytes = fs::read(&path).expect("shards");
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&path, bytes).expect("writable");
    let long = "--resume --set training.steps=100000 --set validation.interval=100000";
    refused(
        &mut tiny.train("run", long),
        "train.bin | not those that were prepared | prepare the data again",
    );
}

#[cfg(unix)]
/// The folder goes between two checkpoints, or while one is written into it: that write fails, and the next comes
/// seconds later.
#[test]
fn a_run_whose_folder_is_removed_recreates_it_and_can_be_resumed() {
    use crate::tiny_run::{ended, signal, wait_until};
    let long = "--set training.steps=1000000 --set validation.interval=1000000 --set data.cache_dir=shared";
    for moment in ["step-4", "step-8.tmp"] {
        let tiny = TinyRun::dma();
        // A pipe that nobody reads would stop the run once it is full: it prints a line a step.
        let log = fs::File::create(tiny.path("log")).expect("writable");
        let mut command = tiny.train("run", long);
        let copy = log.try_clone().expect("open");
        let child = command.stdout(copy).stderr(log).spawn().expect("the program starts");
        wait_until(moment, || tiny.path("run/checkpoint").join(moment).is_dir());
        fs::rename(tiny.path("run"), tiny.path("removed")).expect("writable");
        wait_until("another", || {
            tiny.path("run/config.toml").is_file() && tiny.path("run/metrics.jsonl").is_file()
        });
        refused(
            &mut tiny.train("run", &format!("{long} --resume=auto")),
            "another process is training in run",
        );
        signal(&child, "TERM");
        ended(child, 75);
        let said = fs::read_to_string(tiny.path("log")).expect("text");
        says(&said, "warning: run was removed while the run writes to it");
        succeed(&mut tiny.train("run", &format!("{long} --resume --stop-after 1")));
    }
}

#[test]
fn one_checkpoint_every_so_many_steps_stays() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set checkpoint.keep_every=12 --set checkpoint.keep_latest_k=1");
    assert_eq!(
        tiny.names("run/checkpoint"),
        ["step-12", "step-24", "step-36", "step-40"]
    );
}
