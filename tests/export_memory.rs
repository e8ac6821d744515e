//! An export reads a checkpoint that several processes wrote tensor by tensor: no host holds the model.
use crate::tiny_run::{TinyRun, succeed};
use std::fs;
use std::time::Duration;

/// The largest part of a process's memory that no file backs, in bytes, while it runs.
fn peak_of(command: &mut std::process::Command) -> u64 {
    let mut child = command.stdout(std::process::Stdio::null()).spawn().expect("it starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        peak = peak.max(1024 * kib.unwrap_or(0));
        if let Some(status) = child.try_wait().expect("a child") {
            assert!(status.success());
            return peak;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_export_of_sharded_weights_holds_a_tensor_at_a_time() {
    let tiny = TinyRun::dma();
    // 18 blocks whose largest tensor has 4.7 MB: 129 MB of weights, in three shards. Four steps suffice for a
    // checkpoint.
    let size = "--set model.num_hidden_layers=18 --set model.hidden_size=512 --set model.intermediate_size=1152 \
        --set training.steps=4 --set training.local_batch_size=1 --set training.global_batch_size=3 \
        --set parallelism.zero_stage=3";
    succeed(&mut tiny.launch(3, "run", size));
    // An export of a small model shows what the program itself takes.
    tiny.trained("small", "--set training.steps=4");
    let export = |run: &str| peak_of(&mut tiny.sieve(&format!("export --checkpoint {run} --out of-{run}")));
    let [large, small] = ["run", "small"].map(export);
    let written = tiny.path("of-run/model.safetensors").metadata().expect("written").len();
    let largest = 4 * 2 * 1152 * 512;
    assert!(written > 100 << 20, "{written} bytes of weights");
    // A tensor as it was read, its parts for the file, and the file's buffers.
    assert!(large < small + 6 * largest, "{large} bytes beside {small} of a small model");
}
