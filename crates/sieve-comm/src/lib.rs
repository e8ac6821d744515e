//! Several processes that train one model: ranks, collectives over TCP, heartbeats, and what happens when a rank is
//! lost.
//!
//! Rank 0 holds two TCP connections to each other rank; the other ranks have none among themselves. One connection
//! carries the values of collectives. The other carries a heartbeat every two seconds, errors and goodbye messages; a
//! separate thread reads it, so a rank notices the loss of another one even while it waits for that one's values.

mod error;
mod frame;
mod mesh;
mod pieces;
mod port;
mod shard_group;
mod timeouts;
mod watch;
mod world;

pub use error::{CommError, Failure, Loss};
pub use mesh::{Mesh, place};
pub use pieces::Pieces;
pub use port::ReservedPort;
pub use shard_group::ShardGroup;
pub use timeouts::{Timeouts, Work};
pub use watch::CollectiveCounts;
pub use world::World;
