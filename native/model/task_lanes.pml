/* How the lanes of a scheduler end together (scheduler.h), on two ranks of two lanes. A task is run by a lane when the
 * other rank's lane has come to it, too. On each rank a producer hands in a task on each lane, the one rank in another
 * order than the other, and waits for both; then the host launches another. The rings are in task_ring.pml: here a lane
 * has two numbers, and the scheduler's steps to its end are a step each.
 *
 * Checked: whatever was launched is done when all is over; no lane leaves while the other one of its scheduler has begun a
 * task; nobody waits for ever, for a verdict, a task or a scheduler (no invalid end state, and the claim `ends`).
 *
 * -DNO_PARK (lane 0 does not wait for the other one), -DNO_LATER (a lane that came late to an attempt waits for its
 * verdict only) break what those names say: the checks must notice. */

#define RANKS 2
#ifndef ROUNDS
#define ROUNDS 2 /* producers of each rank, one after the other; with 2 there are too many states to see all, on a small machine */
#endif
#ifndef LATE
#define LATE 2 /* how often a lane comes too late to an attempt to end */
#endif
#define at(r, l) ((r) * 2 + (l))
#define other(r) (1 - (r))
#define NEXT(attempt) (((attempt) + 1) % 4)

byte launched[4], begun[4], done[4];
byte closing[RANKS], verdict[RANKS], parked[RANKS]; /* verdict: attempt * 2 + whether it ends */
byte left[RANKS], said[RANKS], launches[RANKS];
byte producers[RANKS], finished[RANKS];
bool alive[RANKS];
byte over = 0;

#define quiet(r) (done[at(r, 0)] == launched[at(r, 0)] && done[at(r, 1)] == launched[at(r, 1)])

inline runTask(r, l) {
  begun[at(r, l)] = done[at(r, l)] + 1;
  begun[at(other(r), l)] > done[at(r, l)]; /* the peer is there, or was */
  done[at(r, l)]++
}

inline leave(r) {
  atomic {
    left[r]++;
    if
    :: left[r] == 2 -> left[r] = 0; said[r]++; alive[r] = false
    :: else
    fi
  }
}

proctype Lane0(byte r) {
  bool all, ends = false;
  byte late = 0;
  do
  :: launched[at(r, 0)] > done[at(r, 0)] -> runTask(r, 0)
  :: quiet(r) && producers[r] <= finished[r] ->
     said[r]++; /* announced */
     closing[r] = NEXT(closing[r]);
#ifdef NO_PARK
     all = true;
#else
     if
     :: parked[r] == closing[r] -> all = true
     :: done[at(r, 1)] < launched[at(r, 1)] -> all = false /* it is busy */
     :: late < LATE && parked[r] != closing[r] -> /* it has not started, or is slow: not for ever */
        late++;
        all = false
     fi;
#endif
     ends = all && producers[r] <= finished[r];
     ends = ends && quiet(r);
     if
     :: ends
     :: else -> said[r]--
     fi;
     verdict[r] = closing[r] * 2 + ends;
     if
     :: ends -> break
     :: else
     fi
  od;
  leave(r)
}

proctype Lane1(byte r) {
  byte seen, attempt;
  seen = verdict[r] / 2;
  do
  :: closing[r] != seen ->
     attempt = closing[r];
     seen = attempt;
     parked[r] = attempt;
     if
     :: verdict[r] / 2 == attempt ->
        if
        :: verdict[r] == attempt * 2 + 1 -> break
        :: else
        fi
#ifndef NO_LATER
     :: closing[r] != attempt
#endif
     fi
#ifdef NO_PARK
  :: launched[at(r, 1)] > done[at(r, 1)] -> runTask(r, 1)
#else
  :: closing[r] == seen && launched[at(r, 1)] > done[at(r, 1)] ->
     runTask(r, 1)
#endif
  od;
  assert(begun[at(r, 0)] == done[at(r, 0)] && begun[at(r, 1)] == done[at(r, 1)]);
  leave(r)
}

proctype Stream(byte r) {
  byte started = 0;
end:
  do
  :: started < launches[r] && !alive[r] ->
     atomic { started++; alive[r] = true; run Lane0(r); run Lane1(r) }
  od
}

proctype Producer(byte r) {
  launched[at(r, r)]++;
  launched[at(r, 1 - r)]++;
  quiet(r);
  finished[r]++
}

proctype Host(byte r) {
  byte n;
  for (n : 1 .. ROUNDS) {
    run Producer(r);
    producers[r]++;
    if
    :: said[r] + 1 >= 2 * launches[r] -> launches[r]++
    :: else
    fi;
    finished[r] == n
  }
  said[r] == 2 * launches[r] && !alive[r];
  assert(quiet(r) && done[at(r, 0)] == ROUNDS && done[at(r, 1)] == ROUNDS);
  over++
}

init {
  atomic { run Stream(0); run Stream(1); run Host(0); run Host(1) }
}

ltl ends { <> (over == RANKS) }
