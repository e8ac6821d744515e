use super::join::*;
use super::*;
use crate::CollectiveCounts;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

/// Timeouts that a test can wait for.
const QUICK: Timeouts = Timeouts {
    join: Duration::from_secs(20),
    silence: Duration::from_secs(10),
    still: Duration::from_secs(2),
    long: Duration::from_secs(2),
    goodbye: Duration::from_millis(200),
};

/// A listener for rank 0, which reserves a free port, and that port.
fn listen_as_first() -> (TcpListener, u16) {
    let listener = listen(&World::on_this_host(0, 1, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// As [`Mesh::join`], with the listener of rank 0.
fn join(
    world: World,
    listener: Option<TcpListener>,
    timeouts: Timeouts,
    give_up: impl FnOnce(&Failure) + Send + 'static,
) -> Result<Mesh, CommError> {
    let Some(listener) = listener else {
        return Mesh::join(world, "1", timeouts, give_up);
    };
    let peers = accept_all(&world, listener, "1", timeouts)?;
    Mesh::start(world, peers, timeouts, Box::new(give_up))
}

/// Runs `work` on each of `size` ranks, each in a thread, and returns the results by rank.
fn on_ranks<T: Send + 'static>(size: usize, work: impl Fn(&Mesh) -> T + Clone + Send + 'static) -> Vec<T> {
    on_ranks_within(QUICK, size, work)
}

/// As [`on_ranks`], with other timeouts.
fn on_ranks_within<T: Send + 'static>(
    timeouts: Timeouts,
    size: usize,
    work: impl Fn(&Mesh) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let (listener, port) = listen_as_first();
    let mut listener = Some(listener);
    let threads = (0..size).map(|rank| {
        // Rank 0, the first of them, takes the listener.
        let (listener, work) = (listener.take(), work.clone());
        thread::spawn(move || {
            let mesh = join(World::on_this_host(rank, size, port), listener, timeouts, |_| {}).unwrap();
            let result = work(&mesh);
            mesh.leave();
            result
        })
    });
    let threads = threads.collect::<Vec<_>>();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Ten megabytes of values.
const MANY: usize = 2_500_000;

/// Values whose sum depends on the order of the addends.
fn values(rank: usize, count: usize) -> Vec<f32> {
    let value = |index: usize| {
        let scale = [1.0, 1e7, -1e7, 3e-5][(rank + index) % 4];
        scale * (1.0 + index as f32 / 7.0)
    };
    (0..count).map(value).collect()
}

#[test]
fn sums_are_added_in_the_order_of_the_ranks_and_are_equal_on_all() {
    for size in [2, 3, 4] {
        let found = on_ranks(size, |mesh| {
            // Several sizes one after another; the last is sent in many chunks.
            [0, 1, 5, MANY].map(|count| {
                let mut sum = values(mesh.world().rank, count);
                mesh.sum(&mut sum).unwrap();
                sum
            })
        });
        for (place, count) in [0, 1, 5, MANY].into_iter().enumerate() {
            let mut expected = values(0, count);
            for rank in 1..size {
                for (sum, value) in expected.iter_mut().zip(values(rank, count)) {
                    *sum += value;
                }
            }
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for sums in &found {
                assert!(bits(&sums[place]) == bits(&expected), "{size} ranks, {count} values");
            }
        }
    }
}

#[test]
fn sum_parts_gives_each_rank_its_pieces_and_gather_values_joins_them() {
    for size in [2, 3, 4] {
        let found = on_ranks(size, |mesh| {
            let World { rank, size, .. } = *mesh.world();
            [0, 1, 5, MANY].map(|count| {
                // Two tensors one after another, each with a piece for every rank.
                let half = count / 2;
                let parts = |rank: usize| {
                    [0..half, half..count].map(|all| {
                        let at = |rank| all.start + all.len() * rank / size;
                        at(rank)..at(rank + 1)
                    })
                };
                let parts = |rank| parts(rank).to_vec();
                let own = mesh.sum_parts(values(rank, count), &parts).unwrap();
                let mut sum = values(rank, count);
                mesh.sum(&mut sum).unwrap();
                assert!(own == concatenated(&sum, &parts(rank)), "{count} values");
                let count_of = |rank: usize| parts(rank).iter().map(Range::len).sum::<usize>();
                // All ranks are one group, or each is its own, or pairs are groups where pairs divide the ranks.
                [0, 1, 2].into_iter().all(|group_size| {
                    let group = ShardGroup::new(rank, size, group_size);
                    let gathered = mesh.gather_values(&own, &count_of, group).unwrap();
                    let expected = group.ranks().flat_map(|rank| concatenated(&sum, &parts(rank)));
                    gathered == expected.collect::<Vec<_>>()
                })
            })
        });
        assert!(found.iter().flatten().all(|equal| *equal), "{size} ranks");
    }
}

#[test]
fn gather_returns_the_bytes_of_all_ranks_and_broadcast_those_of_rank_0() {
    let found = on_ranks(3, |mesh| {
        let rank = mesh.world().rank;
        mesh.barrier().unwrap();
        let all = mesh.gather(&vec![rank as u8; rank]).unwrap();
        (all, mesh.broadcast(&[7 + rank as u8]).unwrap())
    });
    for (all, first) in found {
        assert_eq!(all, [vec![], vec![1], vec![2, 2]]);
        assert_eq!(first, [7]);
    }
}

#[test]
fn exchange_gives_each_rank_what_the_others_sent_to_it() {
    for size in [2, 3, 4] {
        let found = on_ranks(size, |mesh| {
            let (rank, size) = (mesh.world().rank, mesh.world().size);
            // No bytes for some ranks, many chunks for others.
            let bytes = |to: usize| vec![(10 * rank + to) as u8; (rank + to) % 3 * 2 * MANY];
            mesh.exchange((0..size).map(bytes).collect()).unwrap()
        });
        for (to, found) in found.into_iter().enumerate() {
            let expected = (0..size).map(|from| {
                let value = (10 * from + to) as u8;
                vec![value; (from + to) % 3 * 2 * MANY]
            });
            assert!(expected.eq(found), "rank {to} of {size}");
        }
    }
}

#[test]
fn a_rank_that_ends_is_named_to_all_others() {
    let errors = on_ranks(3, |mesh| {
        if mesh.world().rank == 1 {
            // The system closes the connections of a killed process in this way.
            for peer in mesh.peers.iter() {
                peer.data.shutdown(std::net::Shutdown::Both).unwrap();
                peer.control.shutdown(std::net::Shutdown::Both).unwrap();
            }
            return None;
        }
        Some(mesh.sum(&mut [1.0]).unwrap_err())
    });
    for rank in [0, 2] {
        let Some(CommError::Lost(failure)) = &errors[rank] else {
            panic!("{errors:?}");
        };
        assert_eq!((failure.rank, &failure.loss), (1, &Loss::Ended), "{failure}");
        assert!(failure.place.contains("pid"), "{failure}");
    }
}

#[test]
fn the_error_of_one_rank_reaches_all_others() {
    let errors = on_ranks(3, |mesh| {
        if mesh.world().rank == 2 {
            mesh.fail("shard 3 is damaged");
            return String::new();
        }
        mesh.barrier().unwrap_err().to_string()
    });
    for rank in [0, 1] {
        let text = &errors[rank];
        assert!(text.contains("rank 2 (") && text.contains("shard 3 is damaged"), "{text}");
    }
}

#[test]
fn a_rank_without_heartbeats_is_lost_even_if_no_collective_waits_for_it() {
    let (listener, port) = listen_as_first();
    let timeouts = Timeouts { silence: Duration::from_millis(300), ..QUICK };
    // This rank joins and sends no heartbeats, because it never starts its threads.
    let silent = thread::spawn(move || connect(&World::on_this_host(1, 2, port), "1", timeouts).unwrap());
    let (sender, receiver) = channel();
    let mesh = join(World::on_this_host(0, 2, port), Some(listener), timeouts, move |failure| {
        sender.send(failure.clone()).unwrap();
    });
    let _mesh = mesh.unwrap();
    let _silent = silent.join().unwrap();
    // This rank does not use the mesh meanwhile, as if it waited for its device.
    let failure = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!((failure.rank, failure.loss), (1, Loss::Silent(0)));
}

/// The results of a barrier of three ranks, which rank `late` enters after `work`.
fn late_at_a_barrier(late: usize, work: impl Fn(&Mesh) + Clone + Send + 'static) -> Vec<Result<(), CommError>> {
    let timeouts = Timeouts { silence: Duration::from_secs(1), ..QUICK };
    on_ranks_within(timeouts, 3, move |mesh| {
        if mesh.world().rank == late {
            work(mesh);
        }
        mesh.barrier()
    })
}

/// Makes no progress until the other ranks have reported this one as lost.
fn stand_still(mesh: &Mesh) {
    let told = mesh.watch.failure(Duration::from_secs(60));
    assert!(told.is_some(), "nobody gave this rank up");
}

/// Runs several cases at the same time, because each takes some seconds.
fn side_by_side<T: Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    thread::scope(|scope| {
        for case in cases {
            scope.spawn(|| run(case));
        }
    });
}

#[test]
fn a_rank_with_heartbeats_and_without_progress_is_named() {
    side_by_side(&[0, 2], |&late| {
        let met = late_at_a_barrier(late, |mesh| {
            mesh.set_work(Work::Step);
            stand_still(mesh);
        });
        for (rank, met) in met.into_iter().enumerate() {
            let Err(CommError::Lost(failure)) = met else {
                panic!("rank {rank} continues without {late}: {met:?}");
            };
            assert_eq!((failure.rank, &failure.loss), (late, &Loss::Still(1)));
        }
    });
}

/// If one GPU hangs in a collective, each rank waits for its own GPU and none for another rank.
#[test]
fn if_no_rank_makes_progress_all_end_and_name_the_one_behind() {
    let timeouts = Timeouts { silence: Duration::from_secs(1), long: Duration::from_secs(1), ..QUICK };
    side_by_side(&[0, 2, 3], |&behind| {
        let told = on_ranks_within(timeouts, 3, move |mesh| {
            let is_behind = mesh.world().rank == behind;
            mesh.set_work(Work::Step);
            mesh.set_collective_counts(CollectiveCounts { num_ended: 7, num_reached: if is_behind { 7 } else { 8 } });
            mesh.watch.failure(Duration::from_secs(60))
        });
        for failure in told {
            let failure = failure.expect("all stand still");
            let Loss::AllStill { seconds: 2, behind: found } = &failure.loss else {
                panic!("{failure}");
            };
            let words = format!("rank {behind} (");
            match behind {
                3 => assert_eq!(found, "", "all are equally far"),
                // A rank does not know its own place.
                0 => assert!(found.starts_with("rank 0 has reached collective 7"), "{found}"),
                _ => assert!(found.starts_with(&words) && found.contains("another waits in collective 8"), "{found}"),
            }
        }
    });
}

#[test]
fn long_work_has_a_limit_and_any_work_has_none() {
    side_by_side(&[(Work::Long, true), (Work::Any, false)], |&(work, is_lost)| {
        let late = move |mesh: &Mesh| {
            mesh.set_work(work);
            // It makes progress once, after the timeout of a step (1 s) and before that of long work (2 s).
            thread::sleep(Duration::from_millis(1200));
            mesh.tick();
            let ticked = Instant::now();
            if is_lost {
                stand_still(mesh)
            } else {
                thread::sleep(Duration::from_millis(2900))
            }
            assert!(ticked.elapsed() >= QUICK.long, "{:?}", ticked.elapsed());
        };
        for met in late_at_a_barrier(2, late) {
            match (met, is_lost) {
                (Ok(()), false) => {}
                (Err(CommError::Lost(failure)), true) => {
                    assert_eq!((failure.rank, &failure.loss), (2, &Loss::Still(2)));
                }
                (met, _) => panic!("{work:?}: {met:?}"),
            }
        }
    });
}

#[test]
fn an_unknown_host_name_is_reported_with_a_hint() {
    let timeouts = Timeouts { silence: Duration::from_millis(300), ..QUICK };
    for rank in [0, 1] {
        let mut world = World::on_this_host(rank, 2, 1);
        world.master_addr = "no-such-host.invalid".to_owned();
        let since = std::time::Instant::now();
        let error = Mesh::join(world, "1", timeouts, |_| {}).expect_err("unknown");
        let text = error.to_string();
        for part in [&format!("rank {rank} "), "no-such-host.invalid", "hint", "--master"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    }
}

#[test]
fn the_others_wait_for_a_rank_that_makes_progress_or_does_long_work() {
    // Both last longer than the timeout of a step, which is 1 s here.
    let works: [fn(&Mesh); 2] = [
        |mesh| {
            mesh.set_work(Work::Step);
            for _ in 0..25 {
                thread::sleep(Duration::from_millis(100));
                mesh.tick();
            }
        },
        |mesh| {
            mesh.set_work(Work::Step);
            mesh.set_work(Work::Long);
            thread::sleep(Duration::from_millis(1500));
        },
    ];
    let cases = works.map(|work| [0, 1].map(|late| (late, work)));
    side_by_side(&cases.concat(), |&(late, work)| {
        let met = late_at_a_barrier(late, work);
        assert!(met.iter().all(Result::is_ok), "{met:?}");
    });
}

#[test]
fn ranks_of_another_run_and_second_processes_of_a_rank_are_refused() {
    let (listener, port) = listen_as_first();
    let first = thread::spawn(move || join(World::on_this_host(0, 3, port), Some(listener), QUICK, |_| {}));
    // Another program and a rank of another run are ignored.
    let stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    send(&stranger, 99, b"GET / HTTP/1.1").unwrap();
    let mut other = World::on_this_host(1, 3, port);
    other.run_id = "other".to_owned();
    let error = Mesh::join(other, "1", QUICK, |_| {}).unwrap_err();
    assert!(error.to_string().contains("another run"), "{error}");
    let _one = connect_quietly(port, 1);
    let error = Mesh::join(World::on_this_host(1, 3, port), "1", QUICK, |_| {}).unwrap_err();
    assert!(error.to_string().contains("two processes"), "{error}");
    let error = first.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("two processes"), "{error}");
}

#[test]
fn a_process_without_the_token_does_not_end_the_run() {
    let (listener, port) = listen_as_first();
    let world = |rank, token: &str| World { token: token.to_owned(), ..World::on_this_host(rank, 2, port) };
    let first = world(0, "secret");
    let first = thread::spawn(move || join(first, Some(listener), QUICK, |_| {}));
    for (token, version) in [("", "1"), ("guess", "1"), ("guess", "9.9.9")] {
        let error = Mesh::join(world(1, token), version, QUICK, |_| {}).unwrap_err();
        assert!(error.to_string().contains("a different SIEVE_TOKEN"), "{error}");
    }
    let second = Mesh::join(world(1, "secret"), "1", QUICK, |_| {});
    second.expect("rank 1").leave();
    first.join().unwrap().expect("rank 0").leave();
}

#[test]
fn silent_and_slow_connections_do_not_delay_the_ranks() {
    let (listener, port) = listen_as_first();
    let stranger = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let silent = [(); 6].map(|()| stranger());
    let mut slow = stranger();
    let drip = thread::spawn(move || {
        // The head of a message of one gigabyte.
        let head = [&[HELLO][..], &(1u64 << 30).to_le_bytes()].concat();
        slow.write_all(&head).unwrap();
        while slow.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_millis(300));
        }
    });
    let since = Instant::now();
    let first = thread::spawn(move || join(World::on_this_host(0, 2, port), Some(listener), QUICK, |_| {}));
    let second = Mesh::join(World::on_this_host(1, 2, port), "1", QUICK, |_| {});
    second.expect("rank 1").leave();
    first.join().unwrap().expect("rank 0").leave();
    // Less than the 5 s of `HELLO_WAIT`, after which rank 0 drops a silent connection.
    assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
    drip.join().unwrap();
    drop(silent);
}

#[test]
fn a_gather_sends_one_message_to_each_rank() {
    let (listener, port) = listen_as_first();
    let size = 5;
    let first = thread::spawn(move || {
        let mesh = join(World::on_this_host(0, size, port), Some(listener), QUICK, |_| {}).unwrap();
        assert_eq!(mesh.gather(b"0").unwrap().concat(), b"01234");
        mesh
    });
    let others = (1..size).map(|rank| {
        thread::spawn(move || {
            let peer = connect(&World::on_this_host(rank, size, port), "1", QUICK).unwrap();
            send(&peer.data, GATHER, rank.to_string().as_bytes()).unwrap();
            peer
        })
    });
    let others = others.collect::<Vec<_>>();
    let others = others.into_iter().map(|peer| peer.join().unwrap()).collect::<Vec<_>>();
    let _first = first.join().unwrap();
    for peer in others {
        assert!(matches!(receive(&peer.data), Ok((GATHER, _))));
        peer.data.set_nonblocking(true).unwrap();
        let more = receive(&peer.data);
        assert!(more.is_err(), "a second message: {more:?}");
    }
}

/// The two connections of a rank in a group of 3, without waiting for the others.
fn connect_quietly(port: u16, rank: usize) -> [TcpStream; 2] {
    let address = ("127.0.0.1", port);
    [false, true].map(|is_control| {
        let stream = loop {
            match TcpStream::connect(address) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(RETRY),
            }
        };
        let hello = Hello::text(&World::on_this_host(rank, 3, port), "1", is_control);
        send(&stream, HELLO, hello.as_bytes()).unwrap();
        stream
    })
}

#[test]
fn another_version_or_size_is_refused_with_both_numbers() {
    for (size, version, words) in [(2, "2", ["version 2", "version 1"]), (4, "1", ["WORLD_SIZE=4", "with 2"])] {
        let (listener, port) = listen_as_first();
        let first = thread::spawn(move || join(World::on_this_host(0, 2, port), Some(listener), QUICK, |_| {}));
        let own = Mesh::join(World::on_this_host(1, size, port), version, QUICK, |_| {}).unwrap_err();
        let first = first.join().unwrap().unwrap_err();
        for error in [own.to_string(), first.to_string()] {
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}

#[test]
fn a_rank_that_is_refused_before_its_second_connection_says_why() {
    let (listener, port) = listen_as_first();
    listener.set_nonblocking(false).unwrap();
    let data = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let (first, _) = listener.accept().unwrap();
    send(&first, REFUSED, b"rank 1 runs version 2").unwrap();
    // Rank 0 ends, and another run may take the port.
    drop((first, listener));
    let refused = World { run_id: "refused".to_owned(), ..World::on_this_host(1, 2, port) };
    let deadline = Instant::now() + QUICK.join;
    let answer = wait_for_all(&refused, "2", data, deadline).expect("an answer");
    assert!(matches!(&answer, Answer::Refused(text) if text.contains("version 2")), "{answer:?}");
}

#[test]
fn a_rank_whose_connection_ends_unanswered_connects_again() {
    // The first listener is not rank 0, and ends.
    let (listener, port) = listen_as_first();
    listener.set_nonblocking(false).unwrap();
    let second = thread::spawn(move || Mesh::join(World::on_this_host(1, 3, port), "1", QUICK, |_| {}));
    let (data, _) = listener.accept().unwrap();
    drop((listener, data));
    // Rank 2 connects, leaves before all ranks have joined, and connects again.
    let first = thread::spawn(move || Mesh::join(World::on_this_host(0, 3, port), "1", QUICK, |_| {}));
    drop(connect_quietly(port, 2));
    let third = Mesh::join(World::on_this_host(2, 3, port), "1", QUICK, |_| {});
    third.expect("rank 2").leave();
    second.join().unwrap().expect("rank 1").leave();
    first.join().unwrap().expect("rank 0").leave();
}

#[test]
fn a_taken_port_and_missing_ranks_are_reported() {
    let (taken, port) = listen_as_first();
    let error = Mesh::join(World::on_this_host(0, 2, port), "1", QUICK, |_| {}).unwrap_err();
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
    let timeouts = Timeouts { join: Duration::from_millis(50), ..QUICK };
    let error = join(World::on_this_host(0, 3, port), Some(taken), timeouts, |_| {}).unwrap_err();
    assert!(error.to_string().contains("1 of 3") && error.to_string().contains("missing: 1, 2"), "{error}");
    // A port that is in use, but on which no program listens: the near end of a connection.
    let (other, port) = listen_as_first();
    let held = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let port = held.local_addr().unwrap().port();
    let error = Mesh::join(World::on_this_host(2, 3, port), "1", timeouts, |_| {}).unwrap_err();
    drop((other, held));
    assert!(error.to_string().contains("rank 2 found no rank 0"), "{error}");
}
