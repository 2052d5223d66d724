import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeSet;

import org.apache.kafka.common.Uuid;
import org.apache.kafka.coordinator.group.api.assignor.ConsumerGroupPartitionAssignor;
import org.apache.kafka.coordinator.group.api.assignor.SubscribedTopicDescriber;
import org.apache.kafka.coordinator.group.api.assignor.SubscriptionType;
import org.apache.kafka.coordinator.group.assignor.RangeAssignor;
import org.apache.kafka.coordinator.group.assignor.UniformAssignor;
import org.apache.kafka.coordinator.group.modern.Assignment;
import org.apache.kafka.coordinator.group.modern.GroupSpecImpl;
import org.apache.kafka.coordinator.group.modern.MemberSubscriptionAndAssignmentImpl;

/**
 * Kafka's server-side assignors as a program: lines of JSON in, a line of JSON for each out.
 *
 * <pre>
 * {"assignor": "uniform", "partitions": {topic: 3}, "members": {member: {"instance": "i" or null, "topics": [topic], "assigned": {topic: [0]}}}}
 * {member: {topic: [0, 1, 2]}}
 * </pre>
 *
 * Members, and what they have, are shown to the assignor in the order of the line: in a broker that of a hash
 * map decides.
 */
public class Assignors {
    private static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] arguments) throws IOException {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        StringBuilder answers = new StringBuilder();
        for (String line; (line = lines.readLine()) != null; ) {
            answers.append(JSON.writeValueAsString(assign(JSON.readTree(line)))).append('\n');
        }
        System.out.write(answers.toString().getBytes(StandardCharsets.UTF_8));
        System.out.flush();
    }

    private static ObjectNode assign(JsonNode given) {
        Map<Uuid, Integer> partitions = new HashMap<>();
        given.get("partitions").properties().forEach(
            topic -> partitions.put(uuid(topic.getKey()), topic.getValue().asInt()));
        Map<String, MemberSubscriptionAndAssignmentImpl> members = new LinkedHashMap<>();
        Map<Uuid, Map<Integer, String>> owners = new HashMap<>();
        Set<Set<Uuid>> subscriptions = new LinkedHashSet<>();
        given.get("members").properties().forEach(entry -> {
            JsonNode member = entry.getValue();
            Set<Uuid> topics = new LinkedHashSet<>();
            member.get("topics").forEach(topic -> topics.add(uuid(topic.asText())));
            subscriptions.add(topics);
            Map<Uuid, Set<Integer>> assigned = new LinkedHashMap<>();
            member.get("assigned").properties().forEach(topic -> {
                Uuid id = uuid(topic.getKey());
                topic.getValue().forEach(partition -> {
                    assigned.computeIfAbsent(id, none -> new TreeSet<>()).add(partition.asInt());
                    owners.computeIfAbsent(id, none -> new HashMap<>()).put(partition.asInt(), entry.getKey());
                });
            });
            Optional<String> instance = Optional.ofNullable(member.get("instance").textValue());
            members.put(entry.getKey(), new MemberSubscriptionAndAssignmentImpl(
                Optional.empty(), instance, topics, new Assignment(assigned)));
        });
        SubscriptionType type =
            subscriptions.size() > 1 ? SubscriptionType.HETEROGENEOUS : SubscriptionType.HOMOGENEOUS;
        ConsumerGroupPartitionAssignor assignor =
            given.get("assignor").asText().equals("range") ? new RangeAssignor() : new UniformAssignor();
        ObjectNode answer = JSON.createObjectNode();
        assignor.assign(new GroupSpecImpl(members, type, owners), describer(partitions)).members().forEach(
            (member, target) -> {
                ObjectNode topics = answer.putObject(member);
                target.partitions().forEach((topic, numbers) ->
                    topics.set(text(topic), JSON.valueToTree(new TreeSet<>(numbers))));
            });
        return answer;
    }

    private static SubscribedTopicDescriber describer(Map<Uuid, Integer> partitions) {
        return new SubscribedTopicDescriber() {
            @Override
            public int numPartitions(Uuid topic) {
                return partitions.getOrDefault(topic, -1);
            }

            @Override
            public Set<String> racksForPartition(Uuid topic, int partition) {
                return Set.of();
            }
        };
    }

    private static Uuid uuid(String text) {
        java.util.UUID id = java.util.UUID.fromString(text);
        return new Uuid(id.getMostSignificantBits(), id.getLeastSignificantBits());
    }

    private static String text(Uuid id) {
        return new java.util.UUID(id.getMostSignificantBits(), id.getLeastSignificantBits()).toString();
    }
}
