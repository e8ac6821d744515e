//! Training must work with a transport that sends tensors only when it is waited for, and that writes into the model's
//! own memory.
use crate::tiny_run::TinyRun;
use crate::train_guard::{B, Outcome, Transport, wrong_loss};
use crate::train_ranks::Pair;
use burn::tensor::{DType, TensorMetadata};
use burn_flex::FlexTensor;
use sieve_comm::{Pieces, ShardGroup};
use sieve_train::{Collectives, Exchanged, FaultInjection, Gathered, HostCollectives, Pending, TrainError};

/// A transport that behaves as a GPU's may. Values are sent when the work is waited for, and the gradients' memory is
/// overwritten then. Gathered weights are written into their own memory, which holds NaN while the work is under way.
struct Late(HostCollectives);

impl Collectives<B> for Late {
    fn shard_group(&self) -> ShardGroup {
        Collectives::<B>::shard_group(&self.0)
    }

    fn sum(&self, tensors: Vec<(FlexTensor, Option<Pieces>)>) -> Result<Pending<B>, TrainError> {
        let transport = self.0.clone();
        Ok(Box::new(move || {
            let given = tensors.iter().map(|(tensor, _)| tensor.clone());
            let given = given.collect::<Vec<_>>();
            let sums = Collectives::<B>::sum(&transport, tensors)?()?;
            for tensor in &given {
                overwrite(tensor, |_| f32::NAN);
            }
            Ok(sums)
        }))
    }

    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError> {
        let transport = self.0.clone();
        for Gathered { whole, .. } in &tensors {
            overwrite(whole, |_| f32::NAN);
        }
        Ok(Box::new(move || {
            let leaves = tensors.iter().map(|gathered| gathered.whole.clone());
            let leaves = leaves.collect::<Vec<_>>();
            let found = Collectives::<B>::gather(&transport, tensors)?()?;
            for (leaf, found) in leaves.iter().zip(found) {
                let values = found.as_slice::<f32>().expect("contiguous");
                overwrite(leaf, |index| values[index]);
            }
            Ok(Vec::new())
        }))
    }

    fn exchange(&self, exchanged: Exchanged<B>) -> Result<Pending<B>, TrainError> {
        let transport = self.0.clone();
        Ok(Box::new(move || Collectives::<B>::exchange(&transport, exchanged)?()))
    }
}

/// Writes values into a tensor's memory, so that every clone and view of it sees them, as on a GPU.
fn overwrite(tensor: &FlexTensor, value: impl Fn(usize) -> f32) {
    let count = tensor.shape().num_elements();
    let (dtype, layout) = (tensor.dtype(), tensor.layout());
    assert!(dtype == DType::F32 && layout.is_contiguous(), "{tensor:?}");
    let bytes = tensor.bytes();
    assert!(4 * (layout.start_offset() + count) <= bytes.len());
    let first = bytes.as_ptr().cast::<f32>().cast_mut();
    for index in 0..count {
        // SAFETY: the value lies in the tensor's memory, and no other thread of this rank reads a tensor at this time.
        unsafe {
            let place = first.add(layout.start_offset() + index);
            place.write_volatile(value(index));
        }
    }
}

/// Results of a run by two ranks.
fn run(tiny: &TinyRun, out: &str, overrides: &[&str], transport: Transport) -> [Outcome; 2] {
    // Rows 64 to 87 are three steps in a row after the checkpoint of step 8; they are skipped.
    let wrong = wrong_loss(|row| if (64..88).contains(&row) { f64::NAN } else { 1.0 });
    let pair = Pair { transport, ..Pair::new(tiny, out, overrides) };
    pair.run([FaultInjection::default(), wrong])
}

#[test]
fn nobody_reads_a_gradient_or_leaf_while_it_travels() {
    for zero_stage in ["parallelism.zero_stage=1", "parallelism.zero_stage=2", "parallelism.zero_stage=3"] {
        for optimizer in ["optimizer.name=AdamW", "optimizer.name=Muon"] {
            travel_late(zero_stage, optimizer);
        }
    }
}

fn travel_late(zero_stage: &str, optimizer: &str) {
    let tiny = TinyRun::dma();
    // Each rank has two micro-batches. The second stage has another window. There are validations, checkpoints, and one
    // return to a checkpoint.
    let text = tiny.read("tiny.toml");
    let stages = "[[stage]]\nsteps = 13\n[[stage]]\nsteps = 5\nwindow = 16\n";
    let staged = text.replace("[optimizer]", &format!("{stages}[optimizer]"));
    tiny.write("tiny.toml", staged.replace("steps = 40\n", ""));
    let rows = "training.local_batch_size=2";
    let overrides = &[rows, "lr_scheduler.decay_ratio=0", "validation.interval=3", zero_stage, optimizer];
    let [usual, late] = [
        ("usual", (|mesh| Box::new(HostCollectives::new(mesh, 0))) as Transport),
        ("late", |mesh| Box::new(Late(HostCollectives::new(mesh, 0)))),
    ]
    .map(|(out, transport)| run(&tiny, out, overrides, transport));
    for (usual, late) in usual.iter().zip(&late) {
        let [step, expected] = [late, usual].map(|outcome| outcome.result.as_ref().expect("it ends").step);
        assert_eq!((step, expected), (18, 18));
        assert_eq!(late.losses, usual.losses);
        assert_eq!(late.checkpoints, usual.checkpoints);
        assert!(late.weights == usual.weights);
        let back = usual.notices.iter().filter(|line| line.contains("back from step"));
        assert_eq!(back.count(), 1, "{:?}", usual.notices);
    }
    let [expected, found] = ["usual", "late"].map(|out| tiny.metrics(out, "validation"));
    assert!(found.keys().eq(expected.keys()) && found.len() > 5);
    for (step, line) in expected {
        assert_eq!(found[&step]["loss"], line["loss"], "validation {step}");
    }
    // Checkpoints are written while the next steps run.
    for name in &usual[0].checkpoints {
        for part in 1..=2 {
            for file in ["model", "optimizer"] {
                let file = format!("checkpoint/{name}/{file}-{part:05}-of-00002.safetensors");
                let [late, usual] = ["late", "usual"].map(|out| std::fs::read(tiny.path(out).join(&file)));
                match (late, usual) {
                    (Ok(late), Ok(usual)) => assert!(late == usual, "{file}"),
                    // Older checkpoints were deleted.
                    (late, usual) => assert!(late.is_err() && usual.is_err(), "{file}"),
                }
            }
        }
    }
}
