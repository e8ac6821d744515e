//! An export that `kill -9` ends leaves the earlier export, the new one, or a folder that nothing reads as a model; the
//! next export completes it.
use crate::resume_kill::{moment, seeded};
use crate::tiny_run::{TinyRun, refused, spawned, succeed};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// Number of kills, each at another moment.
const NUM_KILLS: usize = 24;

/// The files of an exported model, without what only `sieve export` reads.
fn files(tiny: &TinyRun, out: &str) -> BTreeMap<String, Vec<u8>> {
    let mut names = tiny.names(out);
    names.retain(|name| !name.contains("sieve_export"));
    let read = |name: &String| fs::read(tiny.path(&format!("{out}/{name}"))).expect("a file");
    names.iter().map(|name| (name.clone(), read(name))).collect()
}

#[test]
fn an_export_that_is_killed_leaves_no_mixture_and_the_next_one_completes_it() {
    let mut random = seeded();
    let tiny = TinyRun::dma();
    let settings = "--set training.steps=4 --set checkpoint.interval=2 --set checkpoint.keep_latest_k=2 \
        --set training.global_batch_size=3 --set training.local_batch_size=1 --set parallelism.zero_stage=3";
    succeed(&mut tiny.launch(3, "run", settings));
    let export =
        |step: u64, out: &str| tiny.sieve(&format!("export --checkpoint run/checkpoint/step-{step} --out {out}"));
    let began = Instant::now();
    let [old, new] = [2, 4].map(|step| {
        let out = format!("whole-{step}");
        succeed(&mut export(step, &out));
        files(&tiny, &out)
    });
    let whole = began.elapsed() / 2;
    assert!(old != new, "two checkpoints");
    let (mut kills, mut unfinished) = (0, 0);
    while kills < NUM_KILLS {
        let _ = fs::remove_dir_all(tiny.path("out"));
        succeed(&mut export(2, "out"));
        let mut child = spawned(&mut export(4, "out"));
        // Half of the kills come at any time, the others once files are there: the renames take a moment.
        let (started, after) = (Instant::now(), moment(&mut random, whole));
        let partial = tiny.path("out/.sieve_export.partial");
        let is_time = || match kills % 2 {
            0 => started.elapsed() >= after,
            _ => partial.join("model.safetensors").exists(),
        };
        while !is_time() && child.try_wait().expect("a child").is_none() {
            std::hint::spin_loop();
        }
        if kills % 2 == 1 {
            std::thread::sleep(moment(&mut random, Duration::from_millis(4)));
        }
        if child.try_wait().expect("a child").is_none() {
            child.kill().expect("SIGKILL is sent");
            kills += 1;
        }
        child.wait().expect("it ends");
        let found = files(&tiny, "out");
        if found != old && found != new {
            unfinished += 1;
            assert!(!found.contains_key("config.json"), "{:?}", found.keys());
            refused(&mut tiny.sieve("import --from out --out imported"), "config.json");
        }
        succeed(&mut export(4, "out"));
        assert!(files(&tiny, "out") == new, "after {kills} kills, {unfinished} of them amid the renames");
    }
}
