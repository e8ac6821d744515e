//! This process's rank and its group, from the environment variables that its launcher set.
use crate::CommError;

/// The group of processes that this one belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// This process's number in the group, from 0.
    pub rank: usize,
    /// Number of processes in the group.
    pub size: usize,
    /// Index of this process among the processes of its host, from 0.
    pub local_rank: usize,
    /// Number of processes on this host.
    pub local_size: usize,
    /// Name or address of rank 0's host.
    pub master_addr: String,
    /// TCP port on which rank 0 listens.
    pub master_port: u16,
    /// Equal on all ranks of a run, so that processes of another run are refused.
    pub run_id: String,
    /// A secret that the user gives to all ranks, so that programs that guess the run's id are refused; may be empty.
    pub token: String,
}

/// Name of the environment variable for [`World::token`].
pub(crate) const TOKEN: &str = "SIEVE_TOKEN";

// Slurm jobs on one host share its ports, so each job gets a port computed from its number.
const FIRST_SLURM_PORT: u64 = 15_000;
const NUM_SLURM_PORTS: u64 = 20_000;
/// A larger number is taken for a typing error: rank 0 allocates an entry for each process before the first connects.
const MAX_SIZE: usize = 1 << 20;

impl World {
    /// A rank in a group of `size` processes that all run on this host; rank 0 listens on a port of 127.0.0.1.
    pub fn on_this_host(rank: usize, size: usize, port: u16) -> Self {
        Self {
            rank,
            size,
            local_rank: rank,
            local_size: size,
            master_addr: "127.0.0.1".to_owned(),
            master_port: port,
            run_id: String::new(),
            token: String::new(),
        }
    }

    /// The group that the environment describes, by torchrun's variables, which `sieve launch` and others set too, or
    /// by a Slurm step's variables. `None` if there is no group, or only one process in it.
    ///
    /// # Errors
    /// Some variables are missing or invalid, or contradict each other.
    pub fn from_env(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, CommError> {
        let read = |name: &str| variable(name).filter(|value| !value.is_empty());
        let mut world = if read("RANK").is_some() || read("WORLD_SIZE").is_some() {
            Self::of_torchrun(&read)?
        } else if read("SLURM_STEP_ID").is_some() && read("SLURM_PROCID").is_some() {
            Self::of_slurm(&read)?
        } else {
            return Ok(None);
        };
        let bad = |name, value: usize, problem: String| {
            let value = value.to_string();
            Err(CommError::BadVariable { name, value, problem })
        };
        if world.size > MAX_SIZE {
            return bad("WORLD_SIZE", world.size, format!("is more than {MAX_SIZE} processes"));
        }
        if world.rank >= world.size {
            let problem = format!("is not a rank of {} processes (WORLD_SIZE)", world.size);
            return bad("RANK", world.rank, problem);
        }
        if world.size > 1 && world.master_port == 0 {
            return bad("MASTER_PORT", 0, "is not a port that others can connect to".to_owned());
        }
        if world.local_rank >= world.local_size {
            let problem = format!("is not a rank of {} on this host", world.local_size);
            return bad("LOCAL_RANK", world.local_rank, problem);
        }
        world.token = read(TOKEN).unwrap_or_default();
        Ok((world.size > 1).then_some(world))
    }

    /// The group that torchrun's variables describe; `read` returns `None` for an empty variable.
    fn of_torchrun(read: &dyn Fn(&str) -> Option<String>) -> Result<Self, CommError> {
        let size = number(read, "WORLD_SIZE", "RANK")?;
        let rank = number(read, "RANK", "WORLD_SIZE")?;
        if size == 1 {
            // One process listens on no port.
            return Ok(Self::on_this_host(rank, size, 0));
        }
        let missing = |missing| CommError::HalfSet { set: "WORLD_SIZE", missing };
        let master_addr = read("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?;
        let mut master_port: u16 = number(read, "MASTER_PORT", "WORLD_SIZE")?;
        // The store of torchrun's agent already listens on MASTER_PORT.
        if read("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True") {
            master_port = master_port.wrapping_add(1);
        }
        // Without LOCAL_RANK there is one process on each host; without LOCAL_WORLD_SIZE all are on this host.
        let (local_rank, local_size) = match read("LOCAL_RANK") {
            None => (0, 1),
            Some(_) => {
                let local_rank = number(read, "LOCAL_RANK", "RANK")?;
                let local_size = match read("LOCAL_WORLD_SIZE") {
                    Some(_) => number(read, "LOCAL_WORLD_SIZE", "LOCAL_RANK")?,
                    None => size,
                };
                (local_rank, local_size)
            }
        };
        Ok(Self {
            rank,
            size,
            local_rank,
            local_size,
            master_addr,
            master_port,
            run_id: read("TORCHELASTIC_RUN_ID").unwrap_or_default(),
            token: String::new(),
        })
    }

    /// The group that the variables of a Slurm step describe.
    fn of_slurm(read: &dyn Fn(&str) -> Option<String>) -> Result<Self, CommError> {
        let size = number(read, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
            .or_else(|_| number(read, "SLURM_NTASKS", "SLURM_PROCID"))?;
        let rank = number(read, "SLURM_PROCID", "SLURM_NTASKS")?;
        if size == 1 {
            // One process listens on no port.
            return Ok(Self::on_this_host(rank, size, 0));
        }
        let job = number::<u64>(read, "SLURM_JOB_ID", "SLURM_PROCID")?;
        let nodes = read("SLURM_STEP_NODELIST")
            .ok_or(CommError::HalfSet { set: "SLURM_PROCID", missing: "SLURM_STEP_NODELIST" })?;
        let step = read("SLURM_STEP_ID").unwrap_or_default();
        // "4(x2),3" means 4 processes on each of two hosts and 3 on a third. The first number is used for all hosts,
        // but at least SLURM_LOCALID + 1: it only divides CPU threads. SLURM_LOCALID alone chooses the GPU.
        let local_rank = number(read, "SLURM_LOCALID", "SLURM_PROCID")?;
        let tasks = read("SLURM_STEP_TASKS_PER_NODE").unwrap_or_default();
        let digits = tasks.split(|c: char| !c.is_ascii_digit()).next();
        let local_size = digits.and_then(|digits| digits.parse().ok());
        Ok(Self {
            rank,
            size,
            local_rank,
            local_size: local_size.unwrap_or(size).max(local_rank + 1),
            master_addr: read("MASTER_ADDR").unwrap_or_else(|| first_host(&nodes)),
            master_port: match read("MASTER_PORT") {
                Some(_) => number(read, "MASTER_PORT", "SLURM_PROCID")?,
                None => (FIRST_SLURM_PORT + job % NUM_SLURM_PORTS) as u16,
            },
            run_id: format!("{job}.{step}"),
            token: String::new(),
        })
    }

    /// Host and port on which rank 0 listens.
    pub fn address(&self) -> String {
        format!("{}:{}", self.master_addr, self.master_port)
    }
}

/// A variable's value as a number. `set` is a variable that is set and requires it.
fn number<T: std::str::FromStr>(
    read: &dyn Fn(&str) -> Option<String>,
    name: &'static str,
    set: &'static str,
) -> Result<T, CommError> {
    let value = read(name).ok_or(CommError::HalfSet { set, missing: name })?;
    value.trim().parse().map_err(|_| CommError::BadVariable {
        name,
        value,
        problem: "is not a valid number".to_owned(),
    })
}

/// The first host of a Slurm host list: `a01` for `a[01-04,07],b3`.
fn first_host(list: &str) -> String {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    match rest.strip_prefix('[') {
        Some(numbers) => {
            let end = numbers.find(['-', ',', ']']).unwrap_or(numbers.len());
            format!("{name}{}", &numbers[..end])
        }
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<Option<World>, CommError> {
        let find = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        World::from_env(&find)
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node-a"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn torchrun_sets_six_variables() {
        let found = world(&TORCHRUN).unwrap().unwrap();
        assert_eq!((found.rank, found.size), (5, 8));
        assert_eq!((found.local_rank, found.local_size), (1, 4));
        assert_eq!(found.address(), "node-a:29500");
        let mut agent = TORCHRUN.to_vec();
        agent.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        agent.push((TOKEN, "secret"));
        let found = world(&agent).unwrap().unwrap();
        assert_eq!((found.master_port, found.token.as_str()), (29501, "secret"));
    }

    #[test]
    fn nothing_set_or_one_process_is_no_group() {
        assert_eq!(world(&[]), Ok(None));
        // Clusters set the address everywhere.
        assert_eq!(world(&[("MASTER_ADDR", "a")]), Ok(None));
        assert_eq!(world(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        // An interactive shell inside an allocation is no step.
        assert_eq!(world(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), Ok(None));
    }

    #[test]
    fn numbers_that_no_group_has_are_refused() {
        let with = |name: &str, value: &str| {
            let others = TORCHRUN.into_iter().filter(|(key, _)| *key != name);
            world(&others.chain([(name, value)]).collect::<Vec<_>>())
        };
        for (name, value, problem) in [
            ("RANK", "8", "RANK=8 is not a rank of 8 processes (WORLD_SIZE)"),
            ("WORLD_SIZE", "1", "RANK=5 is not a rank of 1 processes (WORLD_SIZE)"),
            ("WORLD_SIZE", "0", "RANK=5 is not a rank of 0 processes (WORLD_SIZE)"),
            ("WORLD_SIZE", "1000000000000", "WORLD_SIZE=1000000000000 is more than 1048576 processes"),
            ("MASTER_PORT", "0", "MASTER_PORT=0 is not a port that others can connect to"),
            ("LOCAL_RANK", "4", "LOCAL_RANK=4 is not a rank of 4 on this host"),
        ] {
            let error = with(name, value).expect_err(problem).to_string();
            assert_eq!(error.lines().next(), Some(problem));
        }
    }

    #[test]
    fn a_slurm_step_names_its_first_host() {
        let found = world(&[
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_JOB_ID", "40007"),
            ("SLURM_STEP_NODELIST", "gpu[012-013,020]"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
        ]);
        let found = found.unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank, found.local_size), (3, 8, 3, 4));
        assert_eq!(found.address(), "gpu012:15007");
        for (list, host) in [("a", "a"), ("a,b", "a"), ("a1[7]", "a17"), ("a[1,3]", "a1")] {
            assert_eq!(first_host(list), host);
        }
    }
}
