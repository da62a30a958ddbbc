"""ARC and SIEVE as their papers write them, with lists."""


class ArcPaper:
    """Figure 4. Lists in the order of use, the least recent first."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def held(self):
        return {*self.t1, *self.t2}

    def replace(self, x):
        big = len(self.t1) > self.p
        if self.t1 and (big or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x):
        """Returns whether it was a hit."""
        for resident in (self.t1, self.t2):
            if x in resident:
                resident.remove(x)
                self.t2.append(x)
                return True
        if x in self.b1:
            self.p = min(self.p + max(1, len(self.b2) / len(self.b1)), self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(self.p - max(1, len(self.b1) / len(self.b2)), 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.make_room(x)
            self.t1.append(x)
        return False

    def make_room(self, x):
        recent, total = len(self.t1) + len(self.b1), self.t1 + self.t2 + self.b1 + self.b2
        if recent == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace(x)
            else:
                self.t1.pop(0)
        elif len(total) >= self.c:
            if len(total) == 2 * self.c:
                self.b2.pop(0)
            self.replace(x)


class SievePaper:
    """Algorithm 1. The queue's head, where objects come, is the end of the list."""

    def __init__(self, capacity):
        self.capacity, self.queue, self.visited, self.hand = capacity, [], {}, 0

    def held(self):
        return set(self.queue)

    def request(self, x):
        """Returns whether it was a hit."""
        if x in self.visited:
            self.visited[x] = True
            return True
        if len(self.queue) == self.capacity:
            self.hand %= len(self.queue)
            while self.visited[self.queue[self.hand]]:
                self.visited[self.queue[self.hand]] = False
                self.hand = (self.hand + 1) % len(self.queue)
            del self.visited[self.queue.pop(self.hand)]
        self.queue.append(x)
        self.visited[x] = False
        return False
