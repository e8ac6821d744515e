//! An export reads a checkpoint that several processes wrote tensor by tensor, and so does an import the files of
//! another program: no host holds the model.
use crate::tiny_run::{TinyRun, succeed};
use std::fs;
use std::path::Path;
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

/// Qwen3's 8B, 14B and 32B at an eighth of their width and a few of their blocks: blocks, width, query heads, inner
/// width.
const LAYOUTS: [(&str, usize, usize, usize, usize); 3] =
    [("8b", 9, 512, 8, 1536), ("14b", 6, 640, 10, 2176), ("32b", 5, 640, 16, 3200)];

#[test]
fn an_import_of_many_files_holds_a_tensor_at_a_time() {
    let tiny = TinyRun::new("kind = \"mha\"");
    let import = |from: &str| peak_of(&mut tiny.sieve(&format!("import --from {from} --out of-{from}")));
    tiny.trained("small", "--stop-after 1");
    succeed(&mut tiny.sieve("export --checkpoint small --out small-hf"));
    // What the program itself takes.
    let small = import("small-hf");
    for (name, layers, width, heads, inner) in LAYOUTS {
        let sizes = format!(
            "num_hidden_layers={layers} hidden_size={width} num_attention_heads={heads} intermediate_size={inner} \
             num_key_value_heads=2 head_dim=64 tie_word_embeddings=false"
        );
        let sets = sizes.split_whitespace().map(|set| format!("--set model.{set} ")).collect::<String>();
        tiny.trained(name, &format!("{sets} --stop-after 1"));
        // Gate and up, which are one tensor of ours.
        let largest = (4 * 2 * width * inner) as u64;
        let checkpoint = sieve_hf::Checkpoint::open_model(&tiny.path(name)).expect("it was written");
        let options = sieve_hf::ExportOptions {
            dtype: sieve_hf::ExportDtype::F32,
            max_shard_bytes: 4 * largest,
            form: None,
            eos_token_id: 0,
            pad_token_id: None,
        };
        let files = format!("{name}-hf");
        let report = sieve_hf::export(&checkpoint, &tiny.path(&files), &options).expect("exported");
        let shards = report.files.iter().filter(|file| file.ends_with(".safetensors")).count();
        assert!(shards > 2 && report.num_bytes > 8 * largest, "{name}: {shards} files, {} bytes", report.num_bytes);
        let large = import(&files);
        assert!(large < small + 6 * largest, "{name}: {large} bytes beside {small} of a small model");
        let [before, after] = [format!("{name}/checkpoint/step-1"), format!("of-{files}/step-0")]
            .map(|folder| tensors(&tiny.path(&format!("{folder}/model.safetensors"))));
        assert!(before == after, "{name}: the weights are those of before");
    }
}

/// The bytes of a file's tensors, behind its header, which also has the step.
fn tensors(path: &Path) -> Vec<u8> {
    let mut file = fs::read(path).expect("weights");
    let (len, _) = file.split_first_chunk::<8>().expect("the header's length");
    let header = 8 + u64::from_le_bytes(*len) as usize;
    file.split_off(header)
}
