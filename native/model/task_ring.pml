/* The ring of one lane of a task queue (include/ncclffm/task_queue.h) and the life of its scheduler (scheduler.h): two
 * producers, one scheduler that ends when idle and is launched again by the host, a stop and, with -DABORT, an abort at
 * any time. Numbers wrap at 8, the ring has 2 places. What a producer writes is a step at a time; what the scheduler looks
 * at to take a task is one step. (A place has the number in each of its words, and the scheduler looks at all: as good as
 * one number that is written last, and that is what is here.) Memory is in order, which is what the releases, acquires and
 * fences of the code are there for. Lanes that end together are in task_lanes.pml.
 *
 * Checked: a task is never written over one that is not done; the scheduler runs each task once, in the order of the
 * numbers, and reads what its producer wrote; nothing runs that was not launched; whatever was launched is done when all
 * is over, unless the lane has failed; no more than one scheduler waits behind another; and nobody waits for ever (no invalid end state, and the claim `ends`).
 *
 * -DNO_RECHECK, -DNO_ROOM, -DNO_GENERATION, -DNO_BOUND break what those names say: the checks must notice. */

#define MOD 8
#define DEPTH 2
#define FIRST 6 /* wraps within the run */
#define TASKS 2 /* of each producer */
#define PRODUCERS 2

#define atOrBeyond(a, b) ((((a) + MOD - (b)) % MOD) < MOD / 2)

byte head = FIRST, launched = FIRST, done = FIRST;
byte sequence[DEPTH]; /* of the task in the slot, plus 1 */
byte payload[DEPTH];  /* what the task is: its number, written before sequence */
bool failed = false;

byte said = 0;     /* TaskControl.state: 2 for each scheduler that has ended, and 1 while the next has announced its end */
byte launches = 0; /* of schedulers, by the host */
bool stop = false, aborted = false;
byte producers = 0, finished = 0; /* that the host launched; that have ended */
bool alive = false;               /* a scheduler is running: launches are in the order of their stream */
byte ran = 0;                     /* tasks */
byte over = 0;                    /* producers and host that have ended */

inline raiseLaunched(to) {
  guess = (to + MOD - 1) % MOD;
  do
  :: atomic { /* compare and swap */
       old = launched;
       if
       :: old == guess -> launched = to
       :: else
       fi
     }
     if
     :: old == guess || atOrBeyond(old, to) -> break
     :: else -> guess = old
     fi
  od
}

proctype Producer() {
  byte t, guess, old, n;
  for (n : 1 .. TASKS) {
    atomic { t = head; head = (head + 1) % MOD }
#ifndef NO_ROOM
    if
    :: (t + MOD - done) % MOD < DEPTH
    :: else ->
       raiseLaunched(t); /* a full ring is launched */
       if
       :: (t + MOD - done) % MOD < DEPTH
       :: failed -> break
       :: aborted -> failed = true; break
       fi
    fi;
#endif
    assert(failed || sequence[t % DEPTH] != (t + MOD - DEPTH + 1) % MOD || atOrBeyond(done, sequence[t % DEPTH]));
    payload[t % DEPTH] = t;
    sequence[t % DEPTH] = (t + 1) % MOD;
    if /* launched at once, or with the next one */
    :: n == TASKS -> raiseLaunched((t + 1) % MOD)
    :: n < TASKS -> raiseLaunched((t + 1) % MOD)
    :: n < TASKS
    fi
  }
  if
  :: n > TASKS -> /* waits for the last one, or does not */
     if
     :: atOrBeyond(done, (t + 1) % MOD)
     :: failed
     :: aborted -> failed = true
     :: skip
     fi
  :: else
  fi;
  atomic { finished++; over++ }
}

proctype Scheduler() {
  byte position, before;
  bool quiet;
  position = done;
  do
  :: failed && !aborted -> said++; break
  :: aborted -> failed = true; said++; break
  :: !failed && !aborted &&
#ifdef NO_BOUND
     sequence[position % DEPTH] == (position + 1) % MOD ->
#else
#ifdef NO_GENERATION
     atOrBeyond(launched, (position + 1) % MOD) ->
#else
     atOrBeyond(launched, (position + 1) % MOD) && sequence[position % DEPTH] == (position + 1) % MOD ->
#endif
#endif
     assert(payload[position % DEPTH] == position);
     assert(atOrBeyond(launched, (position + 1) % MOD));
     ran++;
     position = (position + 1) % MOD;
     done = position
  :: !failed && atOrBeyond(done, launched) -> /* nothing to do, for a while */
     before = finished;
     if
     :: stop || producers <= before ->
        said++; /* announced */
#ifdef NO_RECHECK
        break
#else
        before = finished;
        quiet = stop || producers <= before;
        quiet = quiet && atOrBeyond(done, launched);
        if
        :: quiet -> break
        :: else -> said--
        fi
#endif
     :: else
     fi
  od;
  said++;
  alive = false
}

/* The scheduler's stream. */
proctype Stream() {
  byte begun = 0;
end:
  do
  :: begun < launches && !alive ->
     atomic { begun++; alive = true; run Scheduler() }
  od
}

#define quietHost ((producers == finished) && (said == 2 * launches) && !alive)

proctype Host() {
  byte n;
  for (n : 1 .. PRODUCERS) {
    run Producer();
    producers++;
    if
    :: said + 1 >= 2 * launches -> /* the last one is ending, or has ended, and may not have seen it */
       launches++;
       assert(2 * launches <= said + 4)
    :: else
    fi
  }
  /* What was launched is run before a stop, or runs because of it; a stop ends the scheduler. */
  finished == PRODUCERS;
  if
  :: stop = true
  :: skip
  fi;
  quietHost;
  assert(failed || atOrBeyond(done, launched));
  assert(failed || (FIRST + ran) % MOD == done);
  over++
}

active proctype Environment() {
  sequence[0] = (FIRST + 1 + MOD - DEPTH) % MOD;
  sequence[1] = (FIRST + 2 + MOD - DEPTH) % MOD;
  run Stream();
  run Host();
#ifdef ABORT
  aborted = true
#endif
}

ltl ends { <> (over == PRODUCERS + 1) }
