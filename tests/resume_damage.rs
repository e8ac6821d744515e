//! Damaged checkpoints are refused by name, and the one before is used when asked; a full disk loses nothing.
use crate::tiny_run::{INTERVAL, STEPS, TinyRun, refused, succeed};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use sieve_testing::says;
use std::fs;

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
