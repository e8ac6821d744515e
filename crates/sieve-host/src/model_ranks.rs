//! Commands that use a trained model, as several processes of `sieve launch`: each has its pieces of the weights, all
//! compute the same, and rank 0 prints.
use crate::environment::{LAUNCHED, variable};
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::loaded::{PlaceArgs, load_with_bar};
use crate::on_event::OnEvent;
use crate::terminal;
use crate::{gpus, ranks};
use anyhow::Result;
use burn::backend::Autodiff;
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use sieve_comm::{Mesh, World};
use sieve_core::ShownPath;
use sieve_core::recipe::ParallelismSection;
use sieve_hf::{Kept, LoadedModel, load_model_then};
use sieve_ops::{Cuda, DeviceBackend, TrainBackend};
use sieve_train::{Group, ShardedWeights};
use std::path::Path;
use std::sync::Arc;

/// The `shard_ranks` with which all ranks divide the weights.
const ALL_RANKS: usize = 0;
/// Seconds without a heartbeat after which a rank is lost.
const PATIENCE: u64 = 30;

/// The ranks that use a model together.
pub struct ModelRanks {
    mesh: Arc<Mesh>,
}

/// Does `work`; with the ranks among which the model is to be divided, if `sieve launch` has started several.
pub fn with_ranks(work: impl FnOnce(Option<&ModelRanks>) -> Result<()>) -> Result<Exit> {
    let launched = variable(LAUNCHED).is_some();
    let world = if launched { World::from_env(&variable)? } else { None };
    let Some(world) = world else {
        return work(None).map(|()| Exit::Done);
    };
    if world.rank > 0 {
        terminal::mute();
    }
    // A first signal ends this process, as there is no state to save.
    let _interrupt = Interrupt::install(false)?;
    let hint = "\n  hint: the same command starts again";
    ranks::joined(world, PATIENCE, (&OnEvent::nothing(), hint), |mesh| {
        work(Some(&ModelRanks { mesh })).map(|()| Exit::Done)
    })
}

impl ModelRanks {
    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.mesh.world().size
    }

    /// Whether this rank prints and writes files.
    pub fn prints(&self) -> bool {
        self.mesh.world().rank == 0
    }
}

/// The place with the device of this process: of several ranks on GPUs, the one of its number on this host.
pub fn own_place(place: PlaceArgs, ranks: Option<&ModelRanks>) -> Result<PlaceArgs> {
    let device = match ranks {
        Some(ranks) => gpus::own_choice(place.device, ranks.mesh.world())?,
        None => place.device,
    };
    Ok(PlaceArgs { device, ..place })
}

/// A device on which a model can be used whole, or divided among ranks.
pub trait ModelBackend: DeviceBackend {
    /// The backend of collectives.
    type Train: TrainBackend<InnerBackend = Self>;
    /// The ranks as a group whose collectives run between their devices.
    fn group(mesh: Arc<Mesh>, device: &Self::Device) -> Result<Group<Self::Train>>;
}

impl ModelBackend for Flex {
    type Train = Autodiff<Self>;

    fn group(mesh: Arc<Mesh>, _device: &FlexDevice) -> Result<Group<Self::Train>> {
        Ok(Group::on_host(mesh, ALL_RANKS))
    }
}

impl ModelBackend for Cuda {
    type Train = Autodiff<Self>;

    fn group(mesh: Arc<Mesh>, device: &CudaDevice) -> Result<Group<Self::Train>> {
        gpus::connected(mesh, device, &ParallelismSection::default(), &OnEvent::nothing())
    }
}

/// A model, whole or divided among ranks.
pub struct PlacedModel<B: ModelBackend> {
    /// The model with its recipe, shape and state.
    pub loaded: LoadedModel<B>,
    /// This rank's pieces of the weights; `None` if the model is whole.
    weights: Option<Arc<ShardedWeights<B::Train>>>,
}

impl<B: ModelBackend> PlacedModel<B> {
    /// Loads a checkpoint's model. Of several ranks each reads all tensors, one at a time, and keeps its pieces.
    pub fn load(checkpoint: &Path, device: &B::Device, kept: Kept, ranks: Option<&ModelRanks>) -> Result<Self> {
        let Some(ranks) = ranks else {
            return Ok(Self { loaded: load_with_bar(checkpoint, device, kept)?, weights: None });
        };
        let mut weights = ShardedWeights::new(B::group(ranks.mesh.clone(), device)?);
        let mut loaded = load_model_then(checkpoint, device, kept, &mut weights.keeper())?;
        // A run may have written another checkpoint between two ranks' looks for the latest.
        weights.check_equal(&format!("{} of step {}", loaded.path.shown(), loaded.state.step))?;
        let count = ranks.size();
        terminal::remark(&format!(
            "{count} processes, each with {} of weights and one block at a time",
            terminal::bytes(weights.piece_bytes() as u64)
        ));
        let weights = Arc::new(weights);
        loaded.model = loaded.model.with_whole_weights(weights.source());
        Ok(Self { loaded, weights: Some(weights) })
    }

    /// The result of using the model; a gather that failed is the reason of whatever else did.
    pub fn checked<T>(&self, result: Result<T>) -> Result<T> {
        match self.weights.as_ref().and_then(|weights| weights.take_error()) {
            Some(error) => Err(error.into()),
            None => result,
        }
    }
}
